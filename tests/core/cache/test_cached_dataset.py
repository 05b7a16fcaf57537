"""A cached data set gives what the data set gives, computes each sample once, and loses nothing on a normal end."""

from __future__ import annotations

import gc
import multiprocessing
import os
import queue
import threading
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

import bagua_core as bagua
from bagua_core.cache import hit_metrics, write_behind
from bagua_core.cache.cache_loader import CacheLoader
from bagua_core.cache.errors import CacheOptionError
from bagua_core.cache.hit_metrics import metric_name, recent_rate
from bagua_core.cache.lmdb_store import LmdbStore
from bagua_core.cache.node_directory import NodeDirectory
from bagua_core.cache.placement import KEPT_FREE_BYTES, CacheDirectory, place, redis_bytes
from bagua_core.cache.sharing_scope import directory_name, scope_of, scope_on_servers
from bagua_core.data.elastic_loader import ElasticDataLoader
from tests.core.cache.scripts_with_caches import Counted, right, writes_only_at_its_end
from tests.core.data.fake_job import FakeEngine

MIB = 1 << 20


def cached(dataset: Any, room: Path, **options: Any) -> bagua.CachedDataset:
    return bagua.CachedDataset(dataset, directory=str(room), **{"capacity_bytes": 16 * MIB, **options})


def test_every_sample_is_computed_once(room: Path, tmp_path: Path) -> None:
    plain = Counted(30, tmp_path / "log")
    dataset = cached(plain, room)
    for _ in range(3):
        for index in range(30):
            tensor, number = dataset[index]
            assert number == index and tensor.tolist() == [float(index)] * 100
    assert sorted(plain.computed()) == list(range(30))
    stats = dataset.stats()
    assert (stats.hits, stats.misses, stats.hit_rate) == (60, 30, 60 / 90)
    assert len(dataset) == 30
    assert dataset[-1][1] == 29 and dataset[np.int64(3)][1] == 3 and dataset[torch.tensor(4)][1] == 4
    with pytest.raises(IndexError):
        dataset[30]
    dataset.close()
    assert list(room.glob("*/*")) == []


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("persistent", [False, True])
def test_torchs_loader(room: Path, tmp_path: Path, workers: int, persistent: bool) -> None:
    """The loader's processes share what they computed; what they had buffered at their end is there too."""
    plain = Counted(101, tmp_path / "log")
    dataset = cached(plain, room, writer_buffer_size=1000)
    loader = DataLoader(
        dataset, 8, shuffle=True, num_workers=workers, persistent_workers=persistent and workers > 0
    )
    assert all(right(batch) for batch in loader)
    if persistent:
        del loader
        loader = DataLoader(dataset, 8, shuffle=True, num_workers=workers)
    if workers == 0:
        dataset.cache_loader.flush()
    assert dataset.stats().stored == 101
    assert all(right(batch) for batch in loader)
    assert sorted(plain.computed()) == list(range(101))
    stats = dataset.stats()
    assert (stats.hits, stats.misses, stats.dropped) == (101, 101, 0)


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_a_loaders_process_writes_what_it_has_before_it_ends(room: Path, tmp_path: Path, method: str) -> None:
    """Nothing is written until the end: whatever arrives was written by the end's own doing. A process that comes from
    a forkserver, as all do by default since Python 3.14, has read the data set before it begins."""
    plain = Counted(40, tmp_path / "log")
    dataset = cached(plain, room, writer_buffer_size=1000)
    loader = DataLoader(
        dataset, 4, num_workers=2, multiprocessing_context=method, worker_init_fn=writes_only_at_its_end
    )
    for _ in loader:
        pass
    assert dataset.stats().stored == 40


def test_spawned_processes_find_the_same_cache(room: Path, tmp_path: Path) -> None:
    plain = Counted(20, tmp_path / "log")
    dataset = cached(plain, room)
    for index in range(10):
        dataset[index]
    dataset.cache_loader.flush()
    loader = DataLoader(dataset, 4, num_workers=1, multiprocessing_context="spawn")
    assert all(right(batch) for batch in loader)
    assert sorted(plain.computed()) == list(range(20))
    assert dataset.stats().stored == 20


def test_the_main_process_writes_what_it_has_before_it_ends(room: Path, tmp_path: Path) -> None:
    """A child that ends by sys.exit, while this process holds the cache."""
    plain = Counted(40, tmp_path / "log")
    dataset = cached(plain, room, writer_buffer_size=1000)

    def read_all() -> None:
        write_behind.GATHER_S = 600.0
        for index in range(40):
            dataset[index]
        raise SystemExit(3)

    child = multiprocessing.get_context("fork").Process(target=read_all)
    child.start()
    child.join(30)
    assert child.exitcode == 3
    assert dataset.stats().stored == 40


def test_elastic_loader_and_forks_of_it(room: Path, tmp_path: Path) -> None:
    plain = Counted(50, tmp_path / "log")
    dataset = cached(plain, room)
    for workers in (0, 2):
        loader = ElasticDataLoader(dataset, 8, num_workers=workers, engine=FakeEngine())
        for epoch in loader.epochs(2):
            assert all(right(batch) for batch in loader), epoch
        loader.close()
        dataset.cache_loader.flush()  # a forked child has nothing of what this process has still to write
    assert sorted(plain.computed()) == list(range(50))
    stats = dataset.stats()
    assert stats.misses == 50 and stats.hits >= 150


def test_a_value_that_is_written_while_it_is_read_is_not_computed_again(
    room: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(write_behind, "GATHER_S", 600.0)
    plain = Counted(10, tmp_path / "log")
    dataset = cached(plain, room)
    assert dataset[3][1] == 3
    opened = dataset.cache_loader._cache()
    read, reads = opened.store.read, []

    def read_while_it_is_written(keys: Sequence[bytes]) -> Sequence[Any]:
        found = read(keys)
        reads.append(opened.flush(10.0))
        return found

    monkeypatch.setattr(opened.store, "read", read_while_it_is_written)
    assert [number for _, number in dataset.__getitems__([3, 4])] == [3, 4]
    assert reads == [True] and dataset.stats().entries == 1, "3 reached the store during the read"
    assert plain.computed() == [3, 4]


class Doubled(Counted):
    def __getitems__(self, indices: list[int]) -> list[Any]:
        self.batches.append(list(indices))
        return [self[i] for i in indices]

    batches: ClassVar[list[list[int]]] = []


def test_only_what_is_missing_is_asked_of_a_data_set_that_reads_batches(room: Path, tmp_path: Path) -> None:
    plain = Doubled(10, tmp_path / "log")
    Doubled.batches = []
    dataset = cached(plain, room)
    dataset.__getitems__([1, 3])
    assert [number for _, number in dataset.__getitems__([0, 1, 2, 3])] == [0, 1, 2, 3]
    assert Doubled.batches == [[1, 3], [0, 2]]


def test_augmentation_goes_behind_the_cache(room: Path, tmp_path: Path) -> None:
    plain = Counted(5, tmp_path / "log")
    dataset = cached(plain, room, transform=lambda sample: (sample[0].add_(torch.rand(1)), sample[1]))
    torch.manual_seed(0)
    reads = [dataset[3][0][0].item() for _ in range(4)]
    assert len(set(reads)) == 4 and all(3 < value < 4 for value in reads)
    assert plain.computed() == [3]


class Augmented(Counted):
    def __getitem__(self, index: int) -> Any:
        return super().__getitem__(index)[0] + torch.rand(1), np.random.rand()


def test_random_draws_are_said(room: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    dataset = cached(Augmented(5, tmp_path / "log"), room)
    for index in range(5):
        dataset[index]
    (line,) = [record.message for record in caplog.records if "random" in record.message]
    assert "torch" in line and "numpy.random" in line and "transform=" in line
    caplog.clear()
    plain = cached(Counted(5, tmp_path / "log2"), room)
    plain[0]
    assert not caplog.records


# -- which cache is whose


def test_a_full_cache_that_another_loader_has_read_takes_values_once_it_is_cleared(room: Path) -> None:
    one, other = (
        CacheLoader(dataset_name="files", directory=str(room), capacity_bytes=2 * MIB) for _ in "ab"
    )
    with closing(one), closing(other):
        one.put_many({i: torch.full((1000,), float(i)) for i in range(600)})
        assert one.stats().refused and one.num_keys() > 400
        assert other.peek_many([0])[0] is not None
        one.clear()
        one.put_many({i: torch.full((1000,), float(i)) for i in range(300)})
        assert one.num_keys() == 300
        assert other.peek_many([299])[0][0] == 299


def test_names_and_fingerprints_keep_caches_apart(room: Path, tmp_path: Path) -> None:
    def first(value: float, **options: Any) -> float:
        class Constant(torch.utils.data.Dataset[Any]):
            def __len__(self) -> int:
                return options.pop("length", 5)

            def __getitem__(self, index: int) -> float:
                return value

        held.append(cached(Constant(), room, **options))
        held[-1][0]
        held[-1].cache_loader.flush()
        return float(held[-1][0])

    held: list[Any] = []
    assert first(1.0, dataset_name="a") == 1.0
    assert first(2.0, dataset_name="b") == 2.0
    assert first(3.0, dataset_name="a", fingerprint="v2") == 3.0
    assert first(4.0, dataset_name="a") == 1.0, "the very same name: the same cache"


def test_who_shares() -> None:
    agent = {"BAGUA_SESSION_SOCKET": "x", "BAGUA_AGENT_ID": "h1-1"}
    assert scope_of(agent, 5).shared and scope_of(agent, 5) == scope_of(agent, 6)
    assert scope_of(agent, 5).name != scope_of({**agent, "BAGUA_AGENT_ID": "h1-2"}, 5).name, "another run"
    torchrun = {"TORCHELASTIC_RUN_ID": "none"}
    assert scope_of(torchrun, os.getppid()) == scope_of(torchrun, os.getppid())
    assert scope_of(torchrun, os.getppid()).name != scope_of(torchrun, os.getpid()).name
    alone = scope_of({}, 5)
    assert not alone.shared and alone == scope_of({}, 6)
    told = {
        directory_name("embedded", n, f, s) for n in ("", "a/../b") for f in ("", "x") for s in ("1", "2")
    }
    assert len(told) == 8 and all("/" not in name and len(name) < 60 for name in told)


def test_who_shares_servers() -> None:
    """With a name, every job that uses it; without, the nodes of one job, by its id."""
    here = {"BAGUA_SESSION_SOCKET": "x", "BAGUA_AGENT_ID": "h1-1", "BAGUA_JOB_ID": "a"}
    there = {**here, "BAGUA_AGENT_ID": "h2-1"}
    assert scope_on_servers(here, 5, "faces") == scope_on_servers({}, 6, "faces")
    assert scope_on_servers(here, 5, "") == scope_on_servers(there, 6, "")
    assert scope_on_servers(here, 5, "") != scope_on_servers({**here, "BAGUA_JOB_ID": "b"}, 5, "")
    torchrun = {"TORCHELASTIC_RUN_ID": "a"}
    assert scope_on_servers(torchrun, 5, "") == scope_on_servers(torchrun, 6, "")
    nameless = {"TORCHELASTIC_RUN_ID": "none"}  # torchrun's default, which any run may have
    assert scope_on_servers(nameless, 5, "") == scope_of(nameless, 5).name
    assert len({scope_on_servers(e, 5, "") for e in (here, torchrun, nameless, {})}) == 4


GIB = 1 << 30


@pytest.mark.parametrize(
    ("shm", "tmp", "memory", "asked", "where", "capacity"),
    [
        (16 * GIB, 100 * GIB, 16 * GIB, None, "shm", 8 * GIB),
        (16 * GIB, 100 * GIB, 4 * GIB, None, "shm", 2 * GIB),  # a control group's limit counts
        (64 * MIB, 100 * GIB, 16 * GIB, None, "tmp", 50 * GIB),  # a container's usual /dev/shm
        (16 * GIB, 100 * GIB, None, 8 * GIB, "shm", 8 * GIB),
        (4 * GIB, 100 * GIB, None, 8 * GIB, "tmp", 8 * GIB),
        (4 * GIB, 2 * GIB, None, 8 * GIB, "shm", 4 * GIB - KEPT_FREE_BYTES),  # less than asked, and said
        (None, 2 * GIB, None, None, "tmp", 1 * GIB),
        (None, None, None, None, None, 0),
        (MIB, 0, None, None, None, 0),
    ],
)
def test_where_it_goes(
    shm: int | None, tmp: int | None, memory: int | None, asked: int | None, where: str | None, capacity: int
) -> None:
    placed = place([CacheDirectory(Path("shm"), shm), CacheDirectory(Path("tmp"), tmp)], memory, asked)
    assert placed.path == (None if where is None else Path(where)) and placed.capacity_bytes == capacity
    assert placed.reason


def test_a_redis_started_here_never_plans_with_all_memory() -> None:
    assert redis_bytes(16 * GIB, None) == 8 * GIB
    assert redis_bytes(16 * GIB, 3 * GIB) == 3 * GIB
    assert redis_bytes(None, None) == 2 * GIB
    assert redis_bytes(0, None) == MIB


# -- mistakes are said when the cache is made


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"backend": "lmdb"}, "backend='lmdb': there are 'embedded' and 'redis'"),
        ({"capacity_bytes": -1}, "capacity_bytes=-1 is not an integer of at least"),
        ({"capacity_bytes": 1.5}, r"capacity_bytes=1\.5"),
        ({"writer_buffer_size": 0}, "writer_buffer_size=0"),
        ({"capacity": 5}, "has no option capacity=5; it has capacity_bytes"),
        ({"hosts": []}, "backend='embedded' has no option hosts"),
        ({"max_entries": 10}, "has no option max_entries=10"),
        ({"dataset_name": 5}, "dataset_name=5"),
        ({"directory": "relative"}, "directory='relative' is not an absolute path"),
    ],
)
def test_mistakes(options: dict[str, Any], words: str) -> None:
    with pytest.raises(CacheOptionError, match=words):
        bagua.CacheLoader(**options)


def test_other_data_sets_are_refused() -> None:
    with pytest.raises(TypeError, match="has no __len__"):
        bagua.CachedDataset(iter([1]))
    assert bagua.CachedDataset([5, 6, 7], dataset_name="a list")[1] == 6


# -- the loader


def test_a_loader_by_key(room: Path) -> None:
    asked: list[Any] = []

    def load(key: Any) -> Any:
        asked.append(key)
        return {"key": key, "sizes": np.arange(3)}

    loader = bagua.CacheLoader(dataset_name="files", directory=str(room), capacity_bytes=16 * MIB)
    for _ in range(2):
        for key in ("a.jpg", b"raw", 7, "ü" * 1000):
            assert loader.get(key, load)["key"] == key
    assert asked == ["a.jpg", b"raw", 7, "ü" * 1000]
    assert loader.num_keys() == 4
    with pytest.raises(ZeroDivisionError):
        loader.get("fails", lambda key: 1 // 0)
    assert loader.get("fails", lambda key: 3) == 3, "an error is not kept"
    loader.clear()
    assert loader.num_keys() == 0
    loader.close()
    loader.close()
    assert loader.get(7, load)["key"] == 7, "it opens again"
    with pytest.raises(ValueError, match="1 values were loaded for 2 keys"):
        loader.get_many([100, 101], lambda keys: [1])


def test_a_loader_that_its_own_writer_collects_is_closed(room: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Garbage is collected in the thread that happens to allocate, and a loader may be part of a cycle."""
    write, gone, closed = LmdbStore.write, threading.Event(), threading.Event()

    def collects(store: LmdbStore, items: Any) -> Any:
        assert gone.wait(30)
        gc.collect()
        return write(store, items)

    def noted(directory: NodeDirectory) -> None:
        leave(directory)
        closed.set()

    leave = NodeDirectory.leave
    monkeypatch.setattr(LmdbStore, "write", collects)
    monkeypatch.setattr(NodeDirectory, "leave", noted)
    loader = CacheLoader(dataset_name="x", directory=str(room), capacity_bytes=1 << 24)
    loader.get("a", lambda _: 1)
    cycle: list[Any] = [loader]
    cycle.append(cycle)
    gc.disable()
    try:
        del loader, cycle
        gone.set()
        assert closed.wait(30), "the store, the counters and the node's directory are let go"
    finally:
        gc.enable()


def test_a_value_that_cannot_replace_another_leaves_none(room: Path) -> None:
    loader = bagua.CacheLoader(dataset_name="files", directory=str(room), capacity_bytes=2 * MIB)
    with closing(loader):
        loader.put_many({"a": 1, "b": 2, "c": 3})
        loader.put_many({"a": object(), "b": torch.zeros(MIB), "new": object()})
        assert loader.peek_many(["a", "b", "c", "new"]) == [None, None, 3, None]
        stats = loader.stats()
        assert (stats.not_cacheable, stats.refused, stats.stored, stats.entries) == (2, 1, 3, 1)


def test_originals_names() -> None:
    from bagua_core.torch_api.contrib import CachedDataset, CacheLoader
    from bagua_core.torch_api.contrib.cache_loader import CacheLoader as Loader
    from bagua_core.torch_api.contrib.cached_dataset import CachedDataset as Original

    assert Loader is CacheLoader and Original is CachedDataset
    assert CachedDataset([1, 2], "embedded", "positional", 20)[0] == 1


# -- the job's progress


def test_the_rate_of_the_last_while() -> None:
    assert recent_rate((10, 10), (40, 20)) == 0.75
    assert recent_rate((10, 10), (10, 10)) is None
    assert (metric_name(""), metric_name("faces")) == ("cache_hit_rate", "faces_hit_rate")


def test_a_loader_alone_says_its_rate_too(room: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the place of an engine, what takes its numbers."""

    def threads() -> list[threading.Thread]:
        return [t for t in threading.enumerate() if t.name == "bagua-cache-metrics"]

    before = threads()
    said: queue.Queue[tuple[str, float]] = queue.Queue()

    class Metrics(dict[str, float]):
        def __setitem__(self, name: str, value: float) -> None:
            said.put((name, value))

    monkeypatch.setattr(hit_metrics, "EVERY_S", 0.01)
    monkeypatch.setattr(hit_metrics.WorkerEnvironment, "is_present", lambda environ: True)
    monkeypatch.setattr(hit_metrics.runtime, "_engine", SimpleNamespace(metrics=Metrics()))
    with closing(CacheLoader(dataset_name="faces", directory=str(room))) as loader:
        loader.get("a", lambda key: 1)
        assert said.get(timeout=10) == ("faces_hit_rate", 0.0)
        loader.flush()
        loader.get("a", lambda key: 2)
        assert said.get(timeout=10) == ("faces_hit_rate", 1.0)
        (reporter,) = set(threads()) - set(before)
    reporter.join(10)
    assert not reporter.is_alive()
