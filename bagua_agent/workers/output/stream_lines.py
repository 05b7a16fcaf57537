"""Cuts a stream of bytes into lines, and keeps the last of them. Pure; memory is bounded.

A carriage return ends a segment too (progress bars), and each segment says which of the two ended it.
Bytes need not be text.
"""

from __future__ import annotations

import re
from collections import deque
from dataclasses import dataclass, field

from bagua_agent.base.plain_text import unfinished

MAX_LINE_BYTES = 16 * 1024
TAIL_LINES = 20
TAIL_LINE_BYTES = 2048

# Possessive, and the second half takes a whole run: so a run of carriage returns is read twice and not once for each.
_END = re.compile(rb"\r*+\n|\r++")


@dataclass(frozen=True, slots=True)
class Segment:
    """A line or the beginning of one. end: b"\\n", b"\\r" (the next segment overwrites it), or b"" for a line that goes
    on."""

    text: bytes
    end: bytes


class LineCutter:
    """Cuts bytes that are fed to it into segments. `flush` gives out what has no end yet; the line then goes on."""

    def __init__(self) -> None:
        self._rest = b""

    @property
    def has_partial(self) -> bool:
        return bool(self._rest)

    def feed(self, data: bytes) -> list[Segment]:
        data = self._rest + data
        segments = []
        start = 0
        for found in _END.finditer(data):
            end = b"\n" if data[found.end() - 1 : found.end()] == b"\n" else b"\r"
            if end == b"\r" and found.end() == len(data):
                break  # the next byte tells whether it is part of a line end
            segments.append(Segment(data[start : found.start()], end))
            start = found.end()
        self._rest = data[start:]
        if len(self._rest) > MAX_LINE_BYTES:
            segments += self.flush()
        return segments

    def flush(self, *, at_end: bool = False) -> list[Segment]:
        """Returns what has no end yet. at_end: nothing follows. Else what begins a character or colour is kept for its
        next bytes."""
        kept = 0 if at_end else unfinished(self._rest)
        text, self._rest = self._rest[: len(self._rest) - kept], self._rest[len(self._rest) - kept :]
        if not text:
            return []
        if text.endswith(b"\r"):
            return [Segment(text.rstrip(b"\r"), b"\r")]
        return [Segment(text, b"")]


@dataclass(slots=True)
class Tail:
    """The last lines of a stream, each cut to a bounded length."""

    _lines: deque[bytes] = field(default_factory=lambda: deque(maxlen=TAIL_LINES))
    _open: bool = False  # the last line has no end yet
    _overwritten: bool = False  # the last line is a progress bar's, and the next replaces it

    def add(self, segment: Segment) -> None:
        if self._open and self._lines:
            self._lines[-1] = (self._lines[-1] + segment.text)[:TAIL_LINE_BYTES]
        elif not segment.text and segment.end != b"\n":
            return  # the carriage return with which a progress bar begins
        else:
            if self._overwritten and self._lines and segment.text:
                self._lines.pop()
            self._lines.append(segment.text[:TAIL_LINE_BYTES])
        self._open = segment.end == b""
        self._overwritten = segment.end == b"\r"

    def text(self) -> str:
        return b"\n".join(self._lines).decode("utf-8", "replace")


class ShownLines:
    """A stream's lines as its own terminal would show them in the end. One that is too long is cut into several."""

    def __init__(self) -> None:
        self._cutter = LineCutter()
        self._overwritten = b""

    def feed(self, data: bytes) -> list[str]:
        return self._lines(self._cutter.feed(data))

    def end(self) -> list[str]:
        lines = self._lines(self._cutter.flush(at_end=True))
        left, self._overwritten = self._overwritten, b""
        return [*lines, left.decode("utf-8", "replace")] if left else lines

    def _lines(self, segments: list[Segment]) -> list[str]:
        found = []
        for segment in segments:
            text = segment.text or self._overwritten
            if segment.end == b"\r":
                self._overwritten = text
            else:
                found.append(text.decode("utf-8", "replace"))
                self._overwritten = b""
        return found
