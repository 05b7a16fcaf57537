"""Keeps the newest output of each slot's workers in memory, for `bagua-launch logs` and the dashboard.

A stream is one sequence of bytes per slot: the output of a slot's next worker follows that of its last one, on a line
of its own. Positions count from the first byte ever written, so a reader goes on where it stopped. Thread-safe; bounded
for each stream.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

from bagua_agent.workers.output.output_options import Streams

KEPT_BYTES = 128 << 10  # of each stream


@dataclass(frozen=True, slots=True)
class OutputPart:
    """A part of a slot's stream. position: of its first byte; later than asked for if earlier output is not kept any
    more."""

    position: int
    data: bytes


class RecentOutput:
    """The newest output of each slot. kept_bytes: of each stream; the oldest bytes beyond it are dropped."""

    def __init__(self, kept_bytes: int = KEPT_BYTES) -> None:
        self._kept_bytes = kept_bytes
        self._lock = threading.Lock()
        self._streams: dict[
            tuple[int, Streams], tuple[int, bytearray]
        ] = {}  # position of the first byte, bytes

    def add(self, slot: int, stream: Streams, data: bytes) -> None:
        with self._lock:
            position, kept = self._streams.get((slot, stream), (0, bytearray()))
            kept += data
            # twice the size before it is cut: moving the rest costs once per kept_bytes, not once per line
            if len(kept) > 2 * self._kept_bytes:
                dropped = len(kept) - self._kept_bytes
                del kept[:dropped]
                position += dropped
            self._streams[slot, stream] = (position, kept)

    def end_line(self, slot: int, stream: Streams) -> None:
        """Ends the line of a worker that writes no more: the line of the slot's next worker is another one."""
        with self._lock:
            _, kept = self._streams.get((slot, stream), (0, bytearray()))
            if kept and not kept.endswith(b"\n"):
                kept += b"\n"

    def read(self, slot: int, stream: Streams, position: int) -> OutputPart | None:
        """Returns at most kept_bytes from `position` on; the newest ones where more came since. None: this slot's
        stream has written nothing, or nothing reads it because its worker has the terminal."""
        with self._lock:
            if (slot, stream) not in self._streams:
                return None
            first, kept = self._streams[slot, stream]
            end = first + len(kept)
            begin = min(max(position, first, end - self._kept_bytes), end)
            return OutputPart(begin, bytes(kept[begin - first :]))
