"""A broken or full cache slows training, never stops or corrupts it, and says so once a node."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import bagua_core as bagua
from bagua_core.cache import sharing_scope
from bagua_core.cache.fault_notices import FaultNotices
from tests.core.cache.scripts_with_caches import ROOT, Counted, python, right
from tests.docs.printed import printed
from tests.lab.launched import launch, start
from tests.lab.wait import HANG_S, eventually

MIB = 1 << 20


def cached(dataset: Any, room: Path, **options: Any) -> bagua.CachedDataset:
    return bagua.CachedDataset(
        dataset, directory=str(room), **{"capacity_bytes": 16 * MIB, "dataset_name": "a", **options}
    )


class Said:
    """What all processes of a test log about caches."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def count(self, words: str) -> int:
        return self.path.read_text().count(words)


@pytest.fixture
def said(tmp_path: Path) -> Iterator[Said]:
    handler = logging.FileHandler(tmp_path / "said")
    logger = logging.getLogger("bagua.cache")
    logger.addHandler(handler)
    yield Said(tmp_path / "said")
    logger.removeHandler(handler)
    handler.close()


def epoch(dataset: Any, workers: int = 2) -> None:
    """Every sample once, and right. Forked processes: what they log reaches this one."""
    numbers = []
    method = "fork" if workers else None
    for batch in DataLoader(dataset, 7, num_workers=workers, multiprocessing_context=method):
        assert right(batch)
        numbers += batch[1].tolist()
    assert numbers == list(range(len(dataset)))


def files_of(room: Path) -> Path:
    (path,) = room.glob("bagua-cache-*/a-*")
    return path


def test_a_full_cache(room: Path, tmp_path: Path, said: Said) -> None:
    plain = Counted(200, tmp_path / "log", size=5000)
    dataset = cached(plain, room, capacity_bytes=2 * MIB)
    epoch(dataset)
    stats = dataset.stats()
    assert 50 < stats.stored < 120 and stats.stored + stats.refused == 200
    assert (stats.entries, stats.used_bytes <= stats.capacity_bytes < 2 * MIB) == (stats.stored, True)
    before = len(plain.computed())
    epoch(dataset)
    assert len(plain.computed()) - before == stats.refused, "what fits is hit in every epoch"
    assert said.count("full: ") == 1, "of four processes one says it"


def test_a_file_system_without_room(room: Path, tmp_path: Path, said: Said) -> None:
    mounted = room / "small"
    mounted.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=128k", "tmpfs", str(mounted)], check=False)
    assert done.returncode == 0, "mounting needs root, as the lab does"
    try:
        dataset = cached(Counted(20, tmp_path / "log"), mounted)
        epoch(dataset)
        assert dataset.stats().hits == 0
        dataset.close()
    finally:
        subprocess.run(["umount", "-l", str(mounted)], check=True)
    assert said.count("every value is loaded anew") == 3, "once a process: nowhere to remember it"


def test_a_directory_of_another_account(room: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    base = room / f"bagua-cache-{os.geteuid()}"
    base.mkdir(mode=0o700)
    os.chown(base, 12345, 12345)
    dataset = cached(Counted(20, tmp_path / "log"), room)
    epoch(dataset, workers=0)
    assert dataset.stats().hits == 0
    assert caplog.text.count("not a directory of this user alone") == 1


def test_a_directory_that_is_not_there(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    dataset = cached(Counted(20, tmp_path / "log"), tmp_path / "missing")
    epoch(dataset, workers=0)
    assert caplog.text.count("missing") == 1 and dataset.stats().where == "nowhere"


def test_files_of_another_version(room: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = cached(Counted(20, tmp_path / "log"), room)
    epoch(first)
    path, where = files_of(room), first.stats().where
    first.close()
    path.mkdir(mode=0o700, parents=True)
    path.parent.chmod(0o700)
    (path / "data.mdb").write_bytes(b"another" * 2000)
    plain = Counted(20, tmp_path / "log2")
    broken = cached(plain, room)
    epoch(broken)
    assert len(plain.computed()) == 20 and broken.stats().where == "nowhere"
    monkeypatch.setattr(sharing_scope, "FORMAT", sharing_scope.FORMAT + 1)
    renewed = cached(plain, room)
    assert renewed.stats().entries == 0 and renewed.stats().where not in ("nowhere", where)


def test_damaged_samples_are_loaded_anew_and_mended(room: Path, tmp_path: Path, said: Said) -> None:
    plain = Counted(40, tmp_path / "log")
    dataset = cached(plain, room)
    epoch(dataset)
    path = files_of(room)
    with open(path / "data.mdb", "r+b") as data:
        whole = data.read()
        for number in range(1, 40, 4):
            sample = torch.full((100,), float(number)).numpy().tobytes()
            # Pages of the past have it, too
            whole = whole.replace(sample, sample[:50] + b"\x55" + sample[51:])
        data.seek(0)
        data.write(whole)
    before = len(plain.computed())
    epoch(dataset)
    damaged = len(plain.computed()) - before
    assert damaged == 10 and dataset.stats().unreadable == damaged
    epoch(dataset)
    assert len(plain.computed()) - before == damaged, "they are right again"
    assert said.count("is damaged") == 1


def test_a_vanished_directory(room: Path, tmp_path: Path) -> None:
    dataset = cached(Counted(40, tmp_path / "log"), room)
    epoch(dataset)
    for path in sorted(files_of(room).rglob("*")):
        path.unlink()
    files_of(room).rmdir()
    epoch(dataset)
    epoch(dataset, workers=0)
    dataset.close()


class Mixed(Counted):
    def __getitem__(self, index: int) -> Any:
        sample = super().__getitem__(index)
        return {1, 2} if index % 2 else sample


def test_values_that_are_no_bytes_are_used_and_not_kept(
    room: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plain = Mixed(10, tmp_path / "log")
    dataset = cached(plain, room)
    for _ in range(2):
        assert [dataset[i] == {1, 2} if i % 2 else dataset[i][1] == i for i in range(10)] == [True] * 10
    assert len(plain.computed()) == 15 and dataset.stats().not_cacheable == 10
    assert caplog.text.count("is not kept") == 1 and "pickle=True" in caplog.text
    pickled = cached(plain, room, pickle=True, dataset_name="pickled")
    assert [pickled[1] for _ in range(3)] == [{1, 2}] * 3 and len(plain.computed()) == 16


class Deadly(Counted):
    def __getitem__(self, index: int) -> Any:
        if index == 30 and not self.log.with_name("died").exists():
            self.log.with_name("died").touch()
            os.kill(os.getpid(), 9)
        return super().__getitem__(index)


def test_a_loaders_process_killed_costs_what_it_had_buffered(room: Path, tmp_path: Path) -> None:
    plain = Deadly(60, tmp_path / "log")
    dataset = cached(plain, room)
    with pytest.raises((RuntimeError, OSError, EOFError)):  # torch says it in several ways
        epoch(dataset, workers=1)
    epoch(dataset, workers=1)
    again = [i for i in range(60) if plain.computed().count(i) > 1]
    assert len(again) <= 27, "at most the buffer and a batch"
    stats = dataset.stats()
    assert stats.hits + stats.misses >= 60 and stats.stored == 60


SCRIPT = """
import sys
from pathlib import Path
from tests.core.cache.test_cache_faults import Counted, cached
dataset = cached(Counted(30, Path(sys.argv[2])), Path(sys.argv[1]), writer_buffer_size=1000)
dataset.__getitems__(list(range(30)))
raise RuntimeError("the script fails")
"""


def test_nothing_is_left_when_a_script_ends(room: Path, tmp_path: Path) -> None:
    script = python(SCRIPT, str(room), str(tmp_path / "log"), cwd=str(ROOT))
    _, errors = script.communicate(timeout=HANG_S)
    assert script.returncode == 1 and "the script fails" in errors
    assert len(Counted(30, tmp_path / "log").computed()) == 30
    assert list(room.glob("bagua-cache-*/*")) == []


FORK = multiprocessing.get_context("fork")


def hold(room: Path, log: Path, held: Any) -> None:
    dataset = cached(Counted(30, log), room)
    dataset.__getitems__(list(range(30)))
    dataset.cache_loader.flush()
    held.set()
    FORK.Event().wait()


def test_what_a_killed_script_left_is_not_read_and_goes_with_the_next_start(
    room: Path, tmp_path: Path
) -> None:
    held = FORK.Event()
    script = FORK.Process(target=hold, args=(room, tmp_path / "log", held))
    script.start()
    assert held.wait(30)
    script.kill()
    script.join()
    left = files_of(room)
    plain = Counted(30, tmp_path / "log2")
    dataset = cached(plain, room)
    assert files_of(room) != left, "another run is another cache, also under the same name"
    dataset[0]
    assert plain.computed() == [0]


def read_half_then_all(room: Path, log: Path, rank: int, met: Any) -> None:
    os.environ["TORCHELASTIC_RUN_ID"] = "none"
    dataset = cached(Counted(60, log), room)
    dataset.__getitems__(list(range(rank, 60, 2)))
    dataset.cache_loader.flush()
    met.wait(30)
    assert all(dataset[i][1] == i for i in range(60))
    met.wait(30)
    assert dataset.stats().hits == 120


def test_workers_of_torchrun_share(room: Path, tmp_path: Path) -> None:
    met = FORK.Barrier(2)
    workers = [
        FORK.Process(target=read_half_then_all, args=(room, tmp_path / "log", rank, met)) for rank in range(2)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
        assert worker.exitcode == 0
    assert sorted(Counted(60, tmp_path / "log").computed()) == list(range(60))
    assert list(room.glob("bagua-cache-*/*")) == []


def test_each_kind_of_fault_is_said_once_by_the_first_process(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    one, other = FaultNotices(tmp_path, "cache"), FaultNotices(tmp_path, "cache")
    for notices in (one, other, one):
        notices.say("full", "it is full")
        notices.say("lost a:1", "it is lost")
    assert (caplog.text.count("it is full"), caplog.text.count("it is lost")) == (1, 1)
    other.over("lost a:1", "it is back")
    one.over("lost a:1", "it is back")
    assert caplog.text.count("it is back") == 1
    one.say("lost a:1", "lost again")
    assert caplog.text.count("lost again") == 1


# -- in jobs


def launched(directory: Path, *arguments: str) -> str:
    done = launch(*arguments, limit_s=150.0, directory=directory)
    assert done.returncode == 0, done.said
    return done.said


def lines_of(said: str) -> list[tuple[int, int]]:
    """(hits, misses) of the example's epochs."""
    found = []
    for line in said.splitlines():
        if " hits, " in line:
            words = line.replace(",", "").split()
            found.append((int(words[words.index("hits") - 1]), int(words[words.index("misses") - 1])))
    return found


def test_the_example_computes_each_sample_once(tmp_path: Path) -> None:
    (example,) = printed("docs/cached-dataset.md", "python examples")
    done = python((ROOT / example).read_text(), "--samples", "80", "--backend", "redis")
    said, errors = done.communicate(timeout=HANG_S)
    assert done.returncode == 0, errors
    epochs = lines_of(said)
    assert len(epochs) == 3, said
    # the loader reads ahead: reads are counted with an earlier epoch, and beyond the last one
    assert sum(hits + misses for hits, misses in epochs) >= 240, said
    assert sum(misses for _, misses in epochs) <= 110, said


def test_workers_of_a_job_share_and_the_rate_is_in_the_progress(tmp_path: Path) -> None:
    """Two workers, whose loaders' processes read different samples in every epoch, until they are interrupted."""
    example = "examples/cached_dataset.py"
    words = printed("docs/cached-dataset.md", "bagua-launch", {example: str(ROOT / example)})
    words += ["--samples", "400", "--epochs", "1000000"]
    job = start(*words, output=tmp_path / "said", directory=tmp_path)
    try:
        eventually(lambda: "notes_hit_rate 1" in job.text() or not job.is_running, 90, job.text, 0.2)
        job.send(signal.SIGINT)
        job.wait(60)
    finally:
        job.kill()
    said = job.text()
    epochs = lines_of(said)
    assert sum(misses for _, misses in epochs) <= 440, "but for samples that two read at the same time"
    assert "notes_hit_rate 1" in said, said
    assert not list(Path("/dev/shm").glob("bagua-cache-*/notes-*"))


ELASTIC = """
import os, signal, sys
from pathlib import Path
import torch
import bagua_core as bagua
from tests.core.cache.test_cache_faults import Counted, cached, right
bagua.init_process_group()
log = Path(sys.argv[2])
plain = Counted(200, log)
dataset = cached(plain, Path(sys.argv[1]))
loader = bagua.ElasticDataLoader(dataset, 10, seed=0, num_workers=1)
network = torch.nn.Linear(100, 1)
model = bagua.DistributedDataParallel(network, optimizers=[optimizer := torch.optim.SGD(network.parameters(), 1e-6)])
step = 0
for epoch in loader.epochs(4):
    for batch in loader:
        assert right(batch)
        optimizer.zero_grad()
        model(batch[0]).mean().backward()
        optimizer.step()
        step += 1
        if epoch == 1 and step == 25 and bagua.get_rank() == 1 and not (log.parent / "killed").exists():
            (log.parent / "killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)
print("ended with", dataset.stats().misses, "misses", flush=True)
"""


def test_a_workers_loss_and_its_replacement(room: Path, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(ELASTIC)
    said = launched(
        tmp_path,
        *(
            "--nproc-per-node",
            "2",
            "--max-restarts",
            "3",
            str(tmp_path / "script.py"),
            str(room),
            str(tmp_path / "log"),
        ),
    )
    assert (tmp_path / "killed").exists() and "killed by SIGKILL" in said
    computed = Counted(200, tmp_path / "log").computed()
    assert set(computed) == set(range(200))
    assert len(computed) <= 215, "what the node had computed outlived the worker"
    assert list(room.glob("bagua-cache-*/*")) == []


def test_tensors_in_shared_memory_are_not_crowded_out(room: Path, tmp_path: Path) -> None:
    """Samples from the cache travel through a loader's processes without a collate function."""
    dataset = cached(Counted(20, tmp_path / "log"), room)
    epoch(dataset)
    for samples in DataLoader(dataset, 5, num_workers=2, collate_fn=list):
        for tensor, number in samples:
            assert torch.equal(tensor, torch.full((100,), float(number)))
            tensor.add_(1)
    epoch(dataset)
