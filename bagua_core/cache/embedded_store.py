"""Keeps frames on a node without a server: one file of data and one table, shared by the node's processes.

Frames are appended and never moved, overwritten or evicted. When the capacity is used up, further ones are refused:
an epoch reads every sample once, so evicting the least recently used would throw out exactly what is needed next,
while what stays is hit in every epoch. Data is written by system calls, so a full file system is an error and not a
signal; it is read through a map.
"""

from __future__ import annotations

import fcntl
import math
import mmap
import os
from collections.abc import Sequence
from pathlib import Path

from bagua_core.cache.decoding import Buffer
from bagua_core.cache.entry_table import EntryTable, table_bytes
from bagua_core.cache.errors import StoreFault
from bagua_core.cache.fault_notices import FaultNotices
from bagua_core.cache.keys import KeyDigest
from bagua_core.cache.node_directory import lock_within
from bagua_core.cache.placement import KEPT_FREE_BYTES
from bagua_core.cache.stores import Item, Usage, Written

_ALIGNMENT_BYTES = 64
_LEAST_PLACES = 1024
_USUAL_FRAME_BYTES = 16384  # for the number of places when the number of entries is not known
_ROOM_BESIDE = 4 / 3  # places for an entry, so that keys that are no numbers find one soon
_LARGEST_TABLE = 1 / 8  # of the capacity
_LOCKED_WITHIN_S = 5.0
_DATA, _TABLE, _WRITERS = "data", "table", "writers"


def places_for(capacity_bytes: int, entries: int | None) -> int:
    """The number of entries that the table has room for. Pure."""
    wanted = capacity_bytes // _USUAL_FRAME_BYTES if entries is None else int(entries * _ROOM_BESIDE) + 1
    most = int(capacity_bytes * _LARGEST_TABLE) // (table_bytes(1) - table_bytes(0))
    places = max(_LEAST_PLACES, min(wanted, most)) | 1
    while any(places % divisor == 0 for divisor in range(3, math.isqrt(places) + 1, 2)):
        places += 2  # a prime, so that every stride leads to every place
    return places


class EmbeddedStore:
    """One process's use of the files in `directory`, made by the first. See stores.Store.

    capacity_bytes and entries count for the first alone. kept_free_bytes: writing stops rather than leave less than
    this in the file system. Raises OSError and StoreFault where the files cannot be made or are not ours.
    """

    def __init__(
        self,
        directory: Path,
        capacity_bytes: int,
        entries: int | None,
        notices: FaultNotices,
        kept_free_bytes: int = KEPT_FREE_BYTES,
    ) -> None:
        self._directory = directory
        self._notices = notices
        self._kept_free_bytes = kept_free_bytes
        self._least_refused = 1 << 62  # bytes of a frame; smaller ones may still fit
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        self._writers = os.open(directory / _WRITERS, flags, 0o600)
        self._data = -1
        try:
            self._table = self._made(capacity_bytes, entries)
            self._data = os.open(directory / _DATA, flags, 0o600)
            if os.fstat(self._data).st_size != self._table.data_limit:
                raise StoreFault("damaged", f"{directory / _DATA} has lost its size")
            self._map = mmap.mmap(self._data, self._table.data_limit, prot=mmap.PROT_READ)
            self._view = memoryview(self._map)
        except (OSError, ValueError, StoreFault):
            for descriptor in (self._writers, self._data):
                if descriptor >= 0:
                    os.close(descriptor)
            raise

    def _made(self, capacity_bytes: int, entries: int | None) -> EntryTable:
        path = self._directory / _TABLE
        if path.exists():
            return EntryTable(path)
        lock_within(self._writers, _LOCKED_WITHIN_S)
        try:
            if not path.exists():
                self._make(path, capacity_bytes, entries)
        finally:
            fcntl.flock(self._writers, fcntl.LOCK_UN)
        return EntryTable(path)

    def _make(self, path: Path, capacity_bytes: int, entries: int | None) -> None:
        places = places_for(capacity_bytes, entries)
        limit = max(_ALIGNMENT_BYTES, capacity_bytes - table_bytes(places))
        data = os.open(
            self._directory / _DATA, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600
        )
        try:
            os.ftruncate(data, limit)
        finally:
            os.close(data)
        fresh = path.with_name(f"{_TABLE}.new")
        EntryTable.create(fresh, places, limit)
        fresh.rename(path)  # other processes see only a complete table

    def read(self, keys: Sequence[KeyDigest]) -> Sequence[Buffer | None]:
        """The frames lie in shared memory and must not be written to."""
        frames: list[Buffer | None] = []
        for key in keys:
            place = self._table.find(key)
            frames.append(None if place is None else self._view[place[0] : place[0] + place[1]])
        return frames

    def write(self, items: Sequence[Item]) -> Written:
        written = Written()
        fitting = [item for item in items if len(item.frame) < self._least_refused]
        written.refused = len(items) - len(fitting)
        if not fitting:
            return written
        try:
            fcntl.flock(self._writers, fcntl.LOCK_EX)
        except OSError as error:
            written.lost = len(fitting)
            self._notices.say("lock", f"the cache cannot be locked: {error}")
            return written
        try:
            self._append(fitting, written)
        finally:
            fcntl.flock(self._writers, fcntl.LOCK_UN)
        return written

    def _append(self, items: Sequence[Item], written: Written) -> None:
        placed: list[tuple[Item, int]] = []
        begin = end = self._table.data_end
        room = min(self._table.data_limit, begin + self._free_bytes())
        for item in items:
            if not item.replaces and self._table.find(item.key) is not None:
                continue
            size = len(item.frame)
            if end + size > room or not self._table.can_take(item.key):
                self._refuse(size if end + size > room else 0, written)
                continue
            placed.append((item, end))
            end += -(-size // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        # the space first: a writer killed from here on costs space, and never another's frame
        self._table.reserve(min(end, self._table.data_limit))
        for number, (item, at) in enumerate(placed):
            try:
                _write_all(self._data, item.frame, at)
            except OSError as error:
                written.lost += len(placed) - number
                self._notices.say(
                    "write", f"{self._directory} takes no more: {error.strerror}; training goes on"
                )
                return
            if self._table.publish(item.key, at, len(item.frame)):
                written.stored += 1
            else:
                self._refuse(0, written)

    def _refuse(self, size: int, written: Written) -> None:
        written.refused += 1
        if size:
            self._least_refused = min(self._least_refused, size)
        used, most = self._table.data_end, self._table.data_limit
        self._notices.say(
            "full",
            f"full: {self._table.entries} entries, {used} of {most} bytes in {self._directory}; what is in it stays "
            "and is used, further values are loaded anew each time (capacity_bytes= and directory= make room)",
        )

    def _free_bytes(self) -> int:
        system = os.fstatvfs(self._data)
        return max(0, system.f_bavail * system.f_frsize - self._kept_free_bytes)

    def usage(self) -> Usage:
        table = self._table
        return Usage(table.entries, table.data_end, table.data_limit, str(self._directory))

    def count(self) -> int:
        return self._table.entries

    def clear(self) -> None:
        """The space stays used: other processes may be reading what lies there."""
        lock_within(self._writers, _LOCKED_WITHIN_S)
        try:
            self._table.clear()
        finally:
            fcntl.flock(self._writers, fcntl.LOCK_UN)

    def is_whole(self) -> bool:
        return True

    def close(self) -> None:
        # the maps go with this object: a frame that is still being read must not become a fault
        os.close(self._writers)
        os.close(self._data)


def _write_all(descriptor: int, frame: bytearray, at: int) -> None:
    with memoryview(frame) as whole:
        done = 0
        while done < len(whole):
            done += os.pwrite(descriptor, whole[done:], at + done)
