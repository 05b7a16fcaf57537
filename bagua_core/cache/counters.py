"""Counts cache hits and misses over all processes of a node, in rows of counters in one shared file.

Every process adds to a row of its own, so nothing is lost between them. A row whose process has ended, however it
ended, keeps its counts and is continued by the next process: the kernel lets go of the lock on its byte.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
import threading
from pathlib import Path

from bagua_core.cache.errors import StoreFault

NAMES = ("hits", "misses", "stored", "refused", "not_cacheable", "unreadable", "dropped")
_ROW_BYTES = 64
_ROWS = 1024  # processes at once
_SIZE = _ROWS * _ROW_BYTES
# struct flock: type, whence, start, length, pid. Locks of the open file, not of the process, so that closing another
# descriptor of the same file lets go of nothing.
_FLOCK = struct.Struct("@hhqqi4x")


class SharedCounters:
    """The counters of one process, and the sums of all processes. directory None: counts of this process alone."""

    def __init__(self, directory: Path | None) -> None:
        self._lock = threading.Lock()
        self._file = -1
        self._map: mmap.mmap | None = None
        memory: bytearray | mmap.mmap = bytearray(_SIZE)
        row = 0
        if directory is not None:
            self._file = os.open(
                directory / "counters", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600
            )
            try:
                # allocated, so that writing through the map cannot meet a full file system
                os.posix_fallocate(self._file, 0, _SIZE)
                memory = self._map = mmap.mmap(self._file, _SIZE)
                row = self._free_row()
            except (OSError, StoreFault):
                if self._map is not None:
                    self._map.close()
                os.close(self._file)
                raise
        self._all = memoryview(memory).cast("Q")
        self._own = self._all[row * 8 : row * 8 + 8]

    def add(self, **counts: int) -> None:
        with self._lock:
            for name, count in counts.items():
                if count:
                    self._own[NAMES.index(name)] += count

    def totals(self) -> dict[str, int]:
        return {name: sum(self._all[i::8]) for i, name in enumerate(NAMES)}

    def close(self) -> None:
        """Lets go of the row. The counts stay in the file, as long as the directory does, and can still be read."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _free_row(self) -> int:
        for row in range(_ROWS):
            wanted = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, row, 1, 0)
            try:
                fcntl.fcntl(self._file, fcntl.F_OFD_SETLK, wanted)
            except BlockingIOError:
                continue
            return row
        raise StoreFault("counters", f"more than {_ROWS} processes use one cache")
