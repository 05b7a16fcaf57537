"""Provides CacheLoader, whose `get` returns a value from the cache, or computes it and stores it."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bagua_core.cache.cache_plan import DEFAULT_BUFFER_SIZE, CachePlan, plan
from bagua_core.cache.errors import NotCacheableError
from bagua_core.cache.frames import Buffer, Unreadable, decode_many, encode
from bagua_core.cache.hit_metrics import HitMetrics
from bagua_core.cache.keys import Key, digest_of
from bagua_core.cache.open_cache import OpenCache
from bagua_core.cache.random_draws import RandomDraws

FLUSH_WITHIN_S = 60.0
_NOT_THERE = object()


@dataclass(frozen=True, slots=True)
class CacheStatistics:
    """Holds counts of all processes of this node that use or used the cache, DataLoader's included.

    stored: values written. refused: values for which there was no room. not_cacheable: values of other types than the
    cache takes. unreadable: values found damaged. dropped: values that a fault kept from being written. entries,
    used_bytes, capacity_bytes: of the store, -1 where it does not say. where: its directory or servers.
    """

    hits: int
    misses: int
    stored: int
    refused: int
    not_cacheable: int
    unreadable: int
    dropped: int
    entries: int
    used_bytes: int
    capacity_bytes: int
    where: str

    @property
    def hit_rate(self) -> float:
        """Hits over all reads; 0 before the first."""
        reads = self.hits + self.misses
        return self.hits / reads if reads else 0.0


class CacheLoader:
    """A cache of values by key, shared by the processes of this node's part of a job, or by all nodes (Redis).

        loader = CacheLoader(dataset_name="faces")
        value = loader.get("a.jpg", read_and_decode)     # read_and_decode("a.jpg"), once

    Values are numbers, strings, bytes, None, tensors, NumPy arrays, and lists, tuples, named tuples and dictionaries of
    them; others are used, said once and not kept, unless pickle=True. What comes out of the cache is the caller's own
    copy. A cache that is full or broken says so once and costs time, never an error in `get`.

    Works in forked and spawned children. Not for several threads at once.
    """

    _metrics: HitMetrics | None  # of the process that made it; a child's reads are counted there

    def __init__(
        self,
        backend: str = "embedded",
        dataset_name: str = "",
        writer_buffer_size: int = DEFAULT_BUFFER_SIZE,
        *,
        fingerprint: str = "",
        pickle: bool = False,
        **options: Any,
    ) -> None:
        """Opens the cache.

        backend: "embedded" (this node's shared memory) or "redis".
        dataset_name, fingerprint: a cache is found again under the same two only; change the fingerprint with
        whatever changes the values.
        writer_buffer_size: values on their way to the store, in each process.
        pickle: keep values of other types too; only for a store that no other account can write.

        options: of "embedded": capacity_bytes (default: half of what is free), directory (an absolute path; default
        /dev/shm, or the temporary directory where that has no room). Of "redis": hosts (dictionaries with
        host and port; None starts a server on this node), cluster_mode (True shards over all hosts, False gives each
        node one of them), capacity_per_node (bytes, of a server started here; default: half of the free memory).

        Raises CacheOptionError, naming the value, and MissingPartError for a package or program that is needed.
        """
        self._set_up(plan(backend, dataset_name, fingerprint, writer_buffer_size, pickle, options))
        self._cache()
        self._metrics = HitMetrics(self, dataset_name)

    @classmethod
    def _of_plan(cls, made: CachePlan) -> CacheLoader:
        loader = cls.__new__(cls)
        loader._set_up(made)
        loader._cache()
        return loader

    def _set_up(self, made: CachePlan) -> None:
        self._plan = made
        self._draws = RandomDraws()
        self._opened: OpenCache | None = None
        self._metrics = None

    def __getstate__(self) -> CachePlan:
        return self._plan

    def __setstate__(self, made: CachePlan) -> None:
        # Opened by the first use: a child of multiprocessing's forkserver reads this before it begins as a process, and
        # then forgets what was registered for its end.
        self._set_up(made)

    def get(self, key: Key, load_fn: Callable[[Any], Any]) -> Any:
        """Returns the value of `key`: load_fn(key), unless that is known. What load_fn raises is raised."""
        (value,) = self.get_many([key], lambda missing: [load_fn(missing[0])])
        return value

    def get_many(self, keys: Sequence[Any], load_many: Callable[[list[Any]], Sequence[Any]]) -> list[Any]:
        """Returns the values of `keys`, in order.

        load_many: gets the keys that are missing, in order, and returns their values.
        """
        opened = self._cache()
        digests = [digest_of(key) for key in keys]
        values, damaged = self._found(opened, keys, digests)
        missing = [i for i, value in enumerate(values) if value is _NOT_THERE]
        if missing:
            loaded = self._loaded(opened, [keys[i] for i in missing], load_many)
            for i, value in zip(missing, loaded, strict=True):
                values[i] = value
                self._keep(opened, keys[i], digests[i], value, i in damaged)
        opened.counters.add(hits=len(keys) - len(missing), misses=len(missing), unreadable=len(damaged))
        return values

    def peek_many(self, keys: Sequence[Key]) -> list[Any]:
        """Returns the values that are there, None for the others. Counts as reading them."""
        opened = self._cache()
        values, damaged = self._found(opened, keys, [digest_of(key) for key in keys])
        hits = sum(value is not _NOT_THERE for value in values)
        opened.counters.add(hits=hits, misses=len(keys) - hits, unreadable=len(damaged))
        return [None if value is _NOT_THERE else value for value in values]

    def put_many(self, values: Mapping[Any, Any]) -> None:
        """Keeps these values, in the place of others under the same keys, and waits until they are there or refused. A
        key whose new value is not kept has none afterwards, unless the store fails."""
        opened = self._cache()
        for key, value in values.items():
            self._keep(opened, key, digest_of(key), value, True)
        opened.flush(FLUSH_WITHIN_S)

    def flush(self) -> bool:
        """Waits until what this process has computed is in the store, FLUSH_WITHIN_S at most. Returns whether it is."""
        return self._cache().flush(FLUSH_WITHIN_S)

    def stats(self) -> CacheStatistics:
        """Returns the counts so far, over all processes of this node."""
        opened = self._cache()
        usage = opened.store.usage()
        return CacheStatistics(
            **opened.counters.totals(),
            entries=usage.entries,
            used_bytes=usage.used_bytes,
            capacity_bytes=usage.capacity_bytes,
            where=usage.where,
        )

    def counts(self) -> dict[str, int] | None:
        """Returns only the counts of `stats`, also to other threads; None while the cache is closed."""
        opened = self._opened
        return None if opened is None else opened.counters.totals()

    def num_keys(self) -> int:
        """Returns the number of values in the store, after `flush`. Redis iterates over all of its keys for this.

        Raises StoreFault.
        """
        opened = self._cache()
        opened.flush(FLUSH_WITHIN_S)
        return opened.store.count()

    def clear(self) -> None:
        """Forgets every value. Raises StoreFault."""
        opened = self._cache()
        opened.flush(FLUSH_WITHIN_S)
        opened.store.clear()

    def close(self) -> None:
        """Writes what is left and lets go of the cache; the last process to do so removes it from the node. A later
        `get` opens it again. The end of a process, and of this object, does the same."""
        if self._metrics is not None:
            self._metrics.close()
        opened, self._opened = self._opened, None
        if opened is not None and opened.pid == os.getpid():
            opened.close()

    def is_whole(self) -> bool:
        """Tells whether the store, and every server of it, answers now."""
        return self._cache().store.is_whole()

    def _found(
        self, opened: OpenCache, keys: Sequence[Any], digests: Sequence[bytes]
    ) -> tuple[list[Any], set[int]]:
        """Returns the values, _NOT_THERE where there is none, and which of the latter are there but damaged."""
        try:
            return self._decoded(opened, keys, digests, opened.read(digests))
        finally:
            opened.end_read()

    def _decoded(
        self,
        opened: OpenCache,
        keys: Sequence[Any],
        digests: Sequence[bytes],
        frames: Sequence[Buffer | None],
    ) -> tuple[list[Any], set[int]]:
        """Decodes the frames; see _found for the result. The values are copies of what is in the frames."""
        there = [i for i, frame in enumerate(frames) if frame is not None]
        values: list[Any] = [_NOT_THERE] * len(keys)
        damaged: set[int] = set()
        if not there:
            return values, damaged
        found = decode_many(
            [frame for frame in frames if frame is not None],
            [digests[i] for i in there],
            self._plan.allow_pickle,
        )
        for i, value in zip(there, found, strict=True):
            if type(value) is not Unreadable:
                values[i] = value
                continue
            damaged.add(i)
            opened.notices.say(
                "unreadable", f"the value of key {keys[i]!r} is damaged ({value.error}); it is loaded anew"
            )
        return values, damaged

    def _cache(self) -> OpenCache:
        opened = self._opened
        if opened is None or opened.pid != os.getpid():
            # a forked child has the parent's, whose locks and thread are not its own
            opened = self._opened = OpenCache(self._plan)
        return opened

    def _loaded(
        self, opened: OpenCache, keys: list[Any], load_many: Callable[[list[Any]], Sequence[Any]]
    ) -> Sequence[Any]:
        drawn: list[str] = []
        with self._draws.watched(drawn):
            loaded = load_many(keys)
        if drawn:
            opened.notices.say(
                "random",
                f"loading a value drew random numbers ({', '.join(drawn)}): if that is augmentation, every epoch gets "
                "the same; cache what comes before it, and augment in transform=",
            )
        if len(loaded) != len(keys):
            raise ValueError(f"{len(loaded)} values were loaded for {len(keys)} keys")
        return loaded

    def _keep(self, opened: OpenCache, key: Any, digest: bytes, value: Any, replaces: bool) -> None:
        try:
            frame = encode(value, digest, self._plan.allow_pickle)
        except NotCacheableError as error:
            opened.counters.add(not_cacheable=1)
            opened.notices.say("type", f"the value of key {key!r} is not kept: {error}")
            if not replaces:
                return
            frame = bytearray()  # removes the value before, which is not this one
        opened.write(digest, frame, replaces)
