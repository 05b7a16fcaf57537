"""One output that several streams write to: whole lines, a bounded backlog, never a blocking write.

Owns the record of which stream has an unfinished line. Does not know workers; an owner is any hashable name. A caller
that sees `is_full` reads no more from its source, so the backlog stays bounded.
"""

from __future__ import annotations

import errno
import os
import select
import stat
from collections.abc import Hashable

from bagua_agent.base.plain_text import RESET, plain_bytes, unfinished
from bagua_agent.workers.output.stream_lines import Segment

BACKLOG_BYTES = 256 * 1024
FILE_WRITE_BYTES = 64 * 1024
DEFAULT_COLUMNS = 80  # of a terminal that does not know its size
_TO_EMPTY_LINE = b"\r\x1b[K"


class Terminal:
    """Writes to a descriptor that it does not own and whose flags it leaves alone.

    What workers print is made safe to show (plain_text.py), but for an only writer whose bytes go into a file or pipe:
    they are passed on as they are, as under torchrun, since another program may read them.
    """

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.is_tty = os.isatty(fd)
        self.is_shared = False  # workers write to it themselves, so its cursor's position is unknown
        # A pipe or terminal that polls writable takes this many bytes without blocking.
        self._is_file = stat.S_ISREG(os.fstat(fd).st_mode)
        self._write_bytes = FILE_WRITE_BYTES if self._is_file else select.PIPE_BUF
        self._backlog = bytearray()
        self._open_owner: Hashable = None
        self._overwrite = False  # the open line is a progress bar's
        self._shows_status = False
        self._begun: dict[Hashable, bytes] = {}  # of an only writer: the beginning of a character or colour
        self._coloured = False  # a worker may have left its colours behind
        self._broken = False
        self._lost_bytes = 0  # since the last write that succeeded
        self._lost_by = ""

    @property
    def wants_write(self) -> bool:
        return bool(self._backlog)

    @property
    def is_full(self) -> bool:
        return len(self._backlog) >= BACKLOG_BYTES

    @property
    def has_room(self) -> bool:
        return len(self._backlog) < BACKLOG_BYTES // 2

    def add_raw(self, owner: Hashable, data: bytes) -> None:
        """Adds bytes of an only writer, without a prefix."""
        self._close_line_of_another(owner)
        if self.is_tty:
            data = self._begun.pop(owner, b"") + data
            length = unfinished(data)
            if length:
                data, self._begun[owner] = data[:-length], data[-length:]
            if not data:
                return
            self._append_plain(data)
        else:
            self._append(data)
        self._open_owner = None if data.endswith(b"\n") else owner

    def end_raw(self, owner: Hashable) -> None:
        """Records that the only writer writes no more: what it has begun stays so."""
        self._append_plain(self._begun.pop(owner, b""))

    def show_status(self, text: bytes) -> None:
        """Shows a line that the next one of these replaces, and that goes when anything else is written. On a tty
        only."""
        if not self.is_tty:
            return
        self._close_line_of_another(None)
        width = os.get_terminal_size(self.fd).columns or DEFAULT_COLUMNS
        self._append(_TO_EMPTY_LINE + plain_bytes(text)[: width - 1])
        self._shows_status = True

    def end_status(self) -> None:
        if self._shows_status:
            self._append(_TO_EMPTY_LINE)
            self._shows_status = False

    def add_line(self, line: bytes) -> None:
        self._close_line_of_another(None)
        self._end_colours()
        # a progress bar that a worker has drawn gives way, and is drawn again below
        self._append((_TO_EMPTY_LINE if self.is_shared else b"") + line + b"\n")

    def add_segment(self, owner: Hashable, prefix: bytes, segment: Segment) -> None:
        self._close_line_of_another(owner)
        going_on = self._open_owner is not None
        if not going_on and not segment.text and segment.end != b"\n":
            return  # the carriage return with which a progress bar begins
        if going_on and self._overwrite and segment.text:
            self._append(b"\r" + prefix)
        elif not going_on:
            self._append(prefix)
        self._append_plain(segment.text)
        if segment.end == b"\n":
            self._end_colours()
        if segment.end == b"\n" or (segment.end == b"\r" and not self.is_tty):
            self._append(b"\n")
            self._open_owner, self._overwrite = None, False
        else:
            self._open_owner = owner
            self._overwrite = segment.end == b"\r"

    def end_line(self, owner: Hashable) -> None:
        """Ends an unfinished line of an owner that writes no more."""
        if self._open_owner == owner:
            self._close_line_of_another(None)

    def _close_line_of_another(self, owner: Hashable) -> None:
        self.end_status()
        if self._open_owner is not None and self._open_owner != owner:
            self._end_colours()
            self._append(b"\n")
            self._open_owner, self._overwrite = None, False

    def _append_plain(self, data: bytes) -> None:
        data = plain_bytes(data)
        self._coloured |= b"\x1b" in data
        self._append(data)

    def _end_colours(self) -> None:
        """Resets the colours: what follows is another's, and must be readable."""
        if self._coloured:
            self._append(RESET.encode())
            self._coloured = False

    def _append(self, data: bytes) -> None:
        if not self._broken:
            self._backlog += data

    def write_some(self) -> None:
        """Writes what the descriptor takes; call when it polls writable."""
        try:
            written = os.write(self.fd, self._backlog[: self._write_bytes])
        except BlockingIOError:
            return  # someone else made it non-blocking
        except OSError as error:
            # Without a reader (a closed terminal, `| head`) there is no output any more. A full disk may have room
            # later.
            self._broken = error.errno == errno.EPIPE or (self.is_tty and error.errno == errno.EIO)
            self._lost_bytes += len(self._backlog)
            self._lost_by = error.strerror or str(error)
            self._backlog.clear()
            return
        del self._backlog[:written]
        if self._lost_bytes:
            lost, self._lost_bytes = self._lost_bytes, 0
            self.add_line(
                f"bagua-launch: {lost} bytes of output could not be written ({self._lost_by})".encode()
            )


def open_terminals(out_fd: int, err_fd: int) -> tuple[Terminal, Terminal]:
    """Returns the terminals for stdout and stderr; one and the same if both lead to the same place, so lines stay
    whole."""
    out = Terminal(out_fd)
    first, second = os.fstat(out_fd), os.fstat(err_fd)
    same = (first.st_dev, first.st_ino) == (second.st_dev, second.st_ino)
    return out, out if same else Terminal(err_fd)
