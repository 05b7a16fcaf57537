"""A log whose oldest part is removed as it grows: names of its parts, and reading it by positions that stay.

    stdout.log            what is written now
    stdout.log.<end>      the part before; <end>: bytes of the stream up to the end of this part

A position counts the bytes of the stream from its beginning, whether they are kept or not, so a reader goes on across
a rotation where it was. The writer (`log_file.py`) renames the file and then makes a new one. A reader that meets this
sees another newest <end> than before, and looks again. Every read opens its file anew: a reader that waits keeps no
removed file on the disk.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from dataclasses import dataclass
from pathlib import Path

MOST_LOOKS = 20  # a rotation needs a whole part to be written, so two in a row do not meet one reader
_END = re.compile(r"[0-9]{1,18}")


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a stream. position: of its first byte in the stream; later than asked for if what was asked for is not
    kept."""

    position: int
    data: bytes


def part_path(path: Path, end: int) -> Path:
    return path.with_name(f"{path.name}.{end}")


def part_ends(path: Path) -> list[int]:
    """Returns the ends of the parts that are complete, oldest first. Raises OSError."""
    begin = f"{path.name}."
    with os.scandir(path.parent) as entries:
        names = [e.name for e in entries if e.name.startswith(begin)]
    return sorted(int(name[len(begin) :]) for name in names if _END.fullmatch(name[len(begin) :]))


def read_piece(path: Path, position: int, most_bytes: int) -> Piece:
    """Reads what is kept from `position` on; empty at the end of what is written. Raises OSError, also for what is no
    ordinary file."""
    for _ in range(MOST_LOOKS):
        ends = part_ends(path)
        end = next((e for e in ends if e > position), None)
        try:
            piece = _read(path, ends, end, position, most_bytes)
        except FileNotFoundError:
            piece = None
        if part_ends(path) != ends:
            continue
        if piece is None:
            if not ends:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
            return Piece(position, b"")  # the writer was ended between the two steps of a rotation
        if piece.data or end is None:
            return piece
        position = end  # the part has become shorter than its name says
    raise OSError(errno.EBUSY, "it is rotated faster than it can be read", str(path))


def extent(path: Path) -> tuple[int, int]:
    """Returns the positions of the first byte that is kept, and after the last one that is written. Raises OSError."""
    for _ in range(MOST_LOOKS):
        ends = part_ends(path)
        try:
            size = os.stat(path, follow_symlinks=False).st_size
            oldest_size = os.stat(part_path(path, ends[0]), follow_symlinks=False).st_size if ends else 0
        except FileNotFoundError:
            size = oldest_size = 0
        if part_ends(path) == ends:
            return (max(0, ends[0] - oldest_size), ends[-1] + size) if ends else (0, size)
    raise OSError(errno.EBUSY, "it is rotated faster than it can be read", str(path))


def _read(path: Path, ends: list[int], end: int | None, position: int, most_bytes: int) -> Piece:
    file = path if end is None else part_path(path, end)
    descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EPERM, "it is no ordinary file", str(file))
        newest = ends[-1] if ends else 0
        begin = newest if end is None else end - status.st_size
        position = max(position, begin, 0)
        return Piece(position, os.pread(descriptor, most_bytes, position - begin))
    finally:
        os.close(descriptor)
