"""Opens a cache in one process: the node's directory, the counters, the store, and the background writer.

A fault while opening any of these is reported once, and the cache then keeps less or nothing: training
goes on. Not for use in a forked child, which opens its own from the same plan.
"""

from __future__ import annotations

import functools
import logging
import os
import threading
from collections.abc import Sequence
from multiprocessing.util import Finalize
from pathlib import Path

from bagua_core.cache import hosted_redis
from bagua_core.cache.cache_plan import CachePlan
from bagua_core.cache.counters import SharedCounters
from bagua_core.cache.errors import StoreFault
from bagua_core.cache.fault_notices import FaultNotices
from bagua_core.cache.frames import Buffer
from bagua_core.cache.lmdb_store import LmdbStore
from bagua_core.cache.node_directory import NodeDirectory, enter
from bagua_core.cache.redis_store import RedisServers, Server
from bagua_core.cache.stores import Item, NoStore, Store, Written
from bagua_core.cache.write_behind import WriteBehind

log = logging.getLogger("bagua.cache")

_FLUSH_BEFORE_OTHERS = 10  # exit priority: while queues and threads of multiprocessing are still there


class OpenCache:
    """An open cache of one process, written in the background. Raises nothing for a cache that does not work."""

    def __init__(self, plan: CachePlan) -> None:
        self.plan = plan
        self.pid = os.getpid()
        self._directory: NodeDirectory | None = None
        trouble: str | None = None
        try:
            if plan.base is None:
                raise StoreFault("directory", plan.remark or "no directory has room")
            self._directory = enter(plan.base, plan.name)
        except (OSError, StoreFault) as error:
            trouble = str(error)
        path = None if self._directory is None else self._directory.path
        self.notices = FaultNotices(path, plan.title)
        self.counters = self._counted(path)
        self._store = self._opened(path, trouble)
        self._writer = WriteBehind(self._store, plan.buffer_size, functools.partial(_count, self.counters))
        # runs when this object goes, when the process ends by itself, and when a process of multiprocessing does, which
        # knows no atexit
        parts = _Parts(self._writer, self._store, self.counters, self._directory)
        self.close = Finalize(self, _close, (parts,), exitpriority=_FLUSH_BEFORE_OTHERS)

    @property
    def store(self) -> Store:
        return self._store

    def read(self, keys: Sequence[bytes]) -> list[Buffer | None]:
        """Returns a frame for each key, None where there is none. `end_read` follows.

        Frames that this process is about to write count as well. They are looked for first, so that one that is
        written meanwhile is found in the store.
        """
        frames: list[Buffer | None] = [self._writer.pending(key) for key in keys]
        removed = [index for index, frame in enumerate(frames) if frame is not None and not len(frame)]
        missing = [index for index, frame in enumerate(frames) if frame is None]
        if missing:
            for index, frame in zip(missing, self._store.read([keys[i] for i in missing]), strict=True):
                frames[index] = frame
        for index in removed:
            frames[index] = None
        return frames

    def end_read(self) -> None:
        """Ends the newest read; see Store."""
        self._store.end_read()

    def write(self, key: bytes, frame: bytearray, replaces: bool) -> None:
        if not self._writer.put(Item(key, frame, replaces)):
            self.counters.add(dropped=1)
            self.notices.say(
                "slow", "the cache takes no values at the moment; they are dropped, and training goes on"
            )

    def flush(self, within_s: float) -> bool:
        return self._writer.flush(within_s)

    def _counted(self, path: Path | None) -> SharedCounters:
        try:
            return SharedCounters(path)
        except (OSError, StoreFault) as error:
            self.notices.say("counters", f"hits are counted in each process alone: {error}")
            return SharedCounters(None)

    def _opened(self, path: Path | None, trouble: str | None) -> Store:
        plan = self.plan
        try:
            if plan.backend == "redis" and plan.servers:
                if trouble is not None:
                    self.notices.say("directory", f"hits are counted in each process alone: {trouble}")
                return RedisServers(plan.servers, plan.prefix, self.notices, sharded=plan.sharded)
            if path is None:
                raise StoreFault("directory", trouble or "no directory")
            if plan.backend == "redis":
                socket_path = hosted_redis.host(path, plan.capacity_bytes, plan.program)
                return RedisServers([Server(socket_path=str(socket_path))], plan.prefix, self.notices)
            if plan.remark:
                self.notices.say("room", plan.remark)
            return LmdbStore(path, plan.capacity_bytes, self.notices)
        except (OSError, StoreFault) as error:
            self.notices.say("open", f"not usable, every value is loaded anew: {error}")
            return NoStore()


def _count(counters: SharedCounters, written: Written) -> None:
    counters.add(stored=written.stored, refused=written.refused, dropped=written.lost)


class _Parts:
    """Holds the parts that must be closed in order; apart from the OpenCache, so that its finalizer can close them."""

    def __init__(
        self, writer: WriteBehind, store: Store, counters: SharedCounters, directory: NodeDirectory | None
    ) -> None:
        self.writer = writer
        self.store = store
        self.counters = counters
        self.directory = directory


def _close(parts: _Parts) -> None:
    if parts.writer.runs_here:
        # The writer's thread has collected the garbage that this cache was. It can't wait for its own end.
        threading.Thread(target=_close, args=(parts,), name="bagua-cache-close").start()
        return
    unwritten = parts.writer.close()
    if unwritten:
        parts.counters.add(dropped=unwritten)
        log.warning(
            "%d values could not be written in time at the end; they are loaded anew next time", unwritten
        )
    else:
        # a writer that hangs may still use them; the process's end lets go of what is left
        parts.store.close()
        parts.counters.close()
    if parts.directory is not None:
        parts.directory.leave()
