"""Keeps frames on a node without a server: an LMDB file that the node's processes share.

Frames are never evicted. When the capacity is used up, further ones are refused: an epoch reads every sample once, so
evicting the least recently used would throw out exactly what is needed next, while what stays is hit in every epoch.
LMDB keeps frames of more than 2 KB in whole pages of 4 KB. The file is read through a map, so a file that is shorter
than its own table says is refused when it is opened; the rest of what may be wrong with it is an lmdb.Error.
"""

from __future__ import annotations

import fcntl
import os
import time
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path

import lmdb

from bagua_core.cache.errors import StoreFault
from bagua_core.cache.fault_notices import FaultNotices
from bagua_core.cache.fork_gate import ForkGate
from bagua_core.cache.frames import Buffer
from bagua_core.cache.lmdb_clear import clear_environment
from bagua_core.cache.node_directory import lock_within
from bagua_core.cache.placement import KEPT_FREE_BYTES
from bagua_core.cache.refusal_mark import RefusalMark
from bagua_core.cache.stores import Item, Usage, Written

_LOCKED_WITHIN_S = 5.0
_CLEARED_WITHIN_S = 5.0  # reads of other processes end sooner
_CLEAR_EVERY_S = 0.05
_READERS = 1024  # reads at the same moment, of all processes of the node
_LOCK_BYTES = 64 * (_READERS + 2)
_DATA, _LOCK, _WRITERS = "data.mdb", "lock.mdb", "writers"

# LMDB allows one environment per file and process, and none that was inherited by a fork. The key is the lock file's
# device and inode: a directory that was removed may be made anew while the old one's map is in use.
_environments: weakref.WeakValueDictionary[tuple[int, int], lmdb.Environment] = weakref.WeakValueDictionary()


def _close_inherited() -> None:
    for environment in list(_environments.values()):
        environment.close()
    _environments.clear()


_calls = ForkGate(_close_inherited)


def _environment(directory: Path, capacity_bytes: int) -> lmdb.Environment:
    """Returns this process's environment in `directory`, opened once. Raises OSError, lmdb.Error and StoreFault."""
    lock = os.open(directory / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        status = os.fstat(lock)
        known = _environments.get((status.st_dev, status.st_ino))
        if known is not None:
            return known
        # LMDB writes it through a map: a full file system would be a SIGBUS
        os.posix_fallocate(lock, 0, _LOCK_BYTES)
    finally:
        os.close(lock)
    with _calls.entered():
        opened = _opened(directory, capacity_bytes)
    _environments[status.st_dev, status.st_ino] = opened
    return opened


def _opened(directory: Path, capacity_bytes: int) -> lmdb.Environment:
    opened = lmdb.open(
        str(directory),
        map_size=capacity_bytes,
        max_readers=_READERS,
        max_spare_txns=0,  # kept ones would be inherited by a fork
        mode=0o600,
        sync=False,
        readahead=False,
    )
    needed_bytes = (opened.info()["last_pgno"] + 1) * opened.stat()["psize"]
    if os.stat(directory / _DATA).st_size < needed_bytes:
        opened.close()
        raise StoreFault("damaged", f"{directory / _DATA} is shorter than its {needed_bytes} bytes")
    opened.reader_check()  # processes that were killed while they read
    return opened


class LmdbStore:
    """A Store (stores.py) in the file in `directory`, which the first process creates; one object for each process.

    capacity_bytes: of the whole file. kept_free_bytes: writing stops rather than leave less than this in the file
    system. Raises OSError and StoreFault where the file cannot be made or is not ours.
    """

    def __init__(
        self,
        directory: Path,
        capacity_bytes: int,
        notices: FaultNotices,
        kept_free_bytes: int = KEPT_FREE_BYTES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._directory = directory
        self._notices = notices
        self._kept_free_bytes = kept_free_bytes
        self._reading: lmdb.Transaction | None = None
        self._mark = RefusalMark()
        try:
            self._environment = _environment(directory, max(0, capacity_bytes - _LOCK_BYTES))
        except lmdb.Error as error:
            raise StoreFault("damaged", f"{directory} cannot be opened: {error}") from error
        self._writers = os.open(
            directory / _WRITERS, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600
        )

    def read(self, keys: Sequence[bytes]) -> Sequence[Buffer | None]:
        try:
            with _calls.entered():
                self._abort_reading()
                # open until end_read: the frames lie in the map, and copies of large ones cost a fifth of the pace
                self._reading = self._environment.begin(buffers=True)
                return [self._reading.get(key) for key in keys]
        except lmdb.Error as error:
            self._notices.say("read", f"{self._directory} cannot be read, values are loaded anew: {error}")
            return [None] * len(keys)

    def end_read(self) -> None:
        """Ends the newest read; see Store. Pages that a clear frees are used again only once no process reads from
        before it."""
        with _calls.entered():
            self._abort_reading()

    def _abort_reading(self) -> None:
        if self._reading is not None:
            self._reading.abort()
            self._reading = None

    def write(self, items: Sequence[Item]) -> Written:
        written = Written()
        if not all(self._mark.admits(len(item.frame)) for item in items):
            self._mark.look(self.count(), self._clock())
        fitting = [item for item in items if item.frame and self._mark.admits(len(item.frame))]
        kept_out = [item for item in items if item.frame and not self._mark.admits(len(item.frame))]
        written.refused = len(kept_out)
        removed = [item.key for item in items if not item.frame]
        removed += [item.key for item in kept_out if item.replaces]
        if not fitting and not removed:
            return written
        try:
            fcntl.flock(self._writers, fcntl.LOCK_EX)
        except OSError as error:
            written.lost += len(fitting) + len(removed)
            self._notices.say("lock", f"the cache cannot be locked: {error}")
            return written
        try:
            removed += self._put_all(fitting, written)
            self._remove(removed, written)
        finally:
            fcntl.flock(self._writers, fcntl.LOCK_UN)
        return written

    def _put_all(self, items: Sequence[Item], written: Written) -> list[bytes]:
        """Puts the items that there is room for. Returns the keys whose old frames a refused item was to replace."""
        if sum(len(item.frame) for item in items) <= self._free_bytes():
            try:
                written.stored += self._put(items)
                return []
            except lmdb.MapFullError:
                pass  # some of them may fit
            except lmdb.Error as error:
                self._lose(len(items), error, written)
                return []
        refused: list[Item] = []
        for number, item in enumerate(items):
            try:
                if len(item.frame) > self._free_bytes():
                    # others may make room on the file system at any time, and looking costs next to nothing
                    self._refuse(len(item.frame), written, closes=False)
                    refused.append(item)
                    continue
                written.stored += self._put([item])
            except lmdb.MapFullError:
                self._refuse(len(item.frame), written, closes=True)
                refused.append(item)
            except lmdb.Error as error:
                self._lose(len(items) - number, error, written)
                break
        return [item.key for item in refused if item.replaces]

    def _remove(self, keys: Sequence[bytes], written: Written) -> None:
        if not keys:
            return
        try:
            with _calls.entered(), self._environment.begin(write=True) as transaction:
                for key in keys:
                    transaction.delete(key)
        except lmdb.Error as error:
            written.lost += len(keys)
            self._notices.say(
                "remove", f"{self._directory} keeps old values of keys that were given new ones: {error}"
            )

    def _put(self, items: Sequence[Item]) -> int:
        """Puts all items, or none. Returns how many were not there. Raises lmdb.Error."""
        with _calls.entered(), self._environment.begin(write=True) as transaction:
            new = [item for item in items if transaction.put(item.key, item.frame, overwrite=item.replaces)]
        if new and self._mark.stored(max(len(item.frame) for item in new)):
            self._notices.over("full", f"{self._directory} takes values again")
        return len(new)

    def _lose(self, count: int, error: lmdb.Error, written: Written) -> None:
        written.lost += count
        self._notices.say("write", f"{self._directory} takes no more: {error}; training goes on")

    def _refuse(self, size_bytes: int, written: Written, *, closes: bool) -> None:
        written.refused += 1
        usage = self.usage()
        self._mark.refused(size_bytes, usage.entries, self._clock(), closes=closes)
        self._notices.say(
            "full",
            f"full: {usage.entries} entries, {usage.used_bytes} of {usage.capacity_bytes} bytes in {self._directory}; "
            "what is in it stays and is used, further values are loaded anew each time (capacity_bytes= and directory= "
            "make room)",
        )

    def _free_bytes(self) -> int:
        system = os.statvfs(self._directory)
        return max(0, system.f_bavail * system.f_frsize - self._kept_free_bytes)

    def usage(self) -> Usage:
        with _calls.entered():
            table, pages = self._environment.stat(), self._environment.info()
        used_bytes = (pages["last_pgno"] + 1) * table["psize"]
        return Usage(table["entries"], used_bytes, pages["map_size"], str(self._directory))

    def count(self) -> int:
        return self.usage().entries

    def clear(self) -> None:
        lock_within(self._writers, _LOCKED_WITHIN_S)
        try:
            self._clear_within(_CLEARED_WITHIN_S)
        except lmdb.Error as error:
            raise StoreFault("clear", f"{self._directory} cannot be cleared: {error}") from error
        finally:
            fcntl.flock(self._writers, fcntl.LOCK_UN)
        self._mark.forget()
        self._notices.over("full", f"{self._directory} was cleared and takes values again")

    def _clear_within(self, within_s: float) -> None:
        """Clears the environment, and tries again for `within_s` while it is full. Raises lmdb.Error.

        A large map that is full has no room to list its freed pages while others read it.
        """
        deadline_s = time.monotonic() + within_s
        while True:
            try:
                with _calls.entered():
                    self._abort_reading()
                    self._environment.reader_check()  # processes that were killed while they read
                    clear_environment(self._environment)
                return
            except lmdb.MapFullError:
                if time.monotonic() > deadline_s:
                    raise
            time.sleep(_CLEAR_EVERY_S)

    def is_whole(self) -> bool:
        return True

    def close(self) -> None:
        # the map goes with this object: a frame that is still being read must not become a fault
        os.close(self._writers)
