"""The trained state is on the disk and read back by any world; trouble with the disk affects nothing else."""

from __future__ import annotations

import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from bagua_core.elastic.checkpoint import catalogue, layout
from bagua_core.elastic.checkpoint.catalogue import RunState
from bagua_core.elastic.checkpoint.local_storage import LocalStorage
from bagua_core.elastic.checkpoint.part_file import STATE
from bagua_core.elastic.checkpoint.restore import CheckpointMismatch
from bagua_core.elastic.checkpoint.writer import Saved
from tests.core.communication.worlds import run_ranks
from tests.core.elastic.checkpoint.checkpoint_worlds import DEADLINE_S, Rank, steps_on_disk, together, world
from tests.core.elastic.state.trainings import Training, wire_form
from tests.lab.wait import HANG_S

ROOT = Path(__file__).resolve().parents[4]


def form(rank: Rank) -> tuple[bytes, bytes]:
    return wire_form(rank.training.registry.capture())


@pytest.mark.parametrize(("before", "after"), [(1, 1), (2, 2), (4, 3), (1, 4), (3, 1)])
def test_any_world_goes_on_from_any_other(tmp_path: Path, before: int, after: int) -> None:
    first = world(tmp_path, before)
    together(first, 5, begin=True)
    assert steps_on_disk(tmp_path) == [4, 2]
    reference = Rank(tmp_path / "unused", None)
    together([reference], 4)

    second = world(tmp_path, after, seed=7, job="another")
    together(second, begin=True)
    for rank in second:
        assert rank.name.step == 4 and rank.checkpointer.run == 2
        assert form(rank) == form(reference)
    together(second, 3)
    together([reference], 3)
    assert all(form(rank) == form(reference) for rank in second)
    # step 5 of the first run was never on the disk, 6 is the second's
    assert [f.place.run for f in catalogue.find(LocalStorage(tmp_path))][:2] == [2, 1]
    assert steps_on_disk(tmp_path)[:2] == [6, 4]


def test_the_two_newest_are_kept(tmp_path: Path) -> None:
    ranks = world(tmp_path, 2)
    together(ranks, 18, begin=True)
    # The parts before are written by now: rank 0 may otherwise look before several others are.
    together(ranks, 2)
    assert steps_on_disk(tmp_path)[:2] == [20, 18]
    assert len(steps_on_disk(tmp_path)) <= 3  # the newest may have been completed after rank 0 looked
    assert not [p for p in tmp_path.iterdir() if p.name.startswith(".")]


def test_each_rank_writes_its_share_only(tmp_path: Path) -> None:
    together(world(tmp_path, 4), 2, begin=True)
    state = Training("adam", 1)
    state.train(2, seed=0)
    (found,) = catalogue.find(LocalStorage(tmp_path))
    lead = [[e for e in h.entries if e.name == STATE or ".buffer." in e.name] for h in found.headers]
    assert [bool(entries) for entries in lead] == [True, False, False, False]
    sizes = [
        h.data_bytes - sum(e.size_bytes for e in own) for h, own in zip(found.headers, lead, strict=True)
    ]
    assert max(sizes) < sum(sizes) / 2


def test_the_last_state_is_written_at_the_end(tmp_path: Path) -> None:
    ranks = world(tmp_path, 3, every="100")
    together(ranks, 5, begin=True, end=True)
    assert steps_on_disk(tmp_path) == [5]
    assert all(rank.checkpointer.writer.close(0.0) for rank in ranks)
    second = world(tmp_path, 2, seed=3)
    together(second, begin=True)
    assert form(second[1]) == form(ranks[0])


def test_an_unfinished_and_a_corrupted_one_are_passed_over_with_a_reason(tmp_path: Path) -> None:
    together(world(tmp_path, 2), 7, begin=True)
    newest, older = (f.place.directory_name for f in catalogue.find(LocalStorage(tmp_path))[:2])
    (tmp_path / newest / "part-00001-of-00002.safetensors").unlink()
    second = world(tmp_path, 3)
    together(second, begin=True)
    assert {rank.name.step for rank in second} == {4}
    assert any("part 1 of 2 is missing" in text for text in second[0].said)

    # of the same length: only reading shows it
    path = tmp_path / older / "part-00001-of-00002.safetensors"
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)
    third = world(tmp_path, 3)
    together(third, begin=True)
    assert {rank.name.step for rank in third} == {2 if len(steps_on_disk(tmp_path)) == 1 else 0}
    assert all(any("another digest" in text for text in rank.said) for rank in third)


def test_another_script_is_told_what_differs(tmp_path: Path) -> None:
    together(world(tmp_path, 2, global_batch_size="24", torch="2.1"), 2, begin=True)
    with pytest.raises(CheckpointMismatch) as raised:
        together(world(tmp_path, 1, global_batch_size="32", torch="2.2"), begin=True)
    text = str(raised.value)
    assert "global_batch_size: the checkpoint has 24, the script 32" in text and "torch:" not in text
    assert "--checkpoint-dir" in text and str(tmp_path) in text


def test_a_script_whose_forward_changes_buffers_fits_its_own_checkpoint(tmp_path: Path) -> None:
    def grown(rank: Rank) -> None:
        rank.training.model.mask = torch.ones(5, dtype=torch.bool)

    (rank,) = world(tmp_path, 1)
    grown(rank)
    rank.checkpointer._fingerprint = rank.training.registry.fingerprint
    together([rank], 2, begin=True)
    (second,) = world(tmp_path, 1, seed=7)
    together([second], begin=True)
    assert second.name.step == 2 and form(second) == form(rank)


def _pass(gate: threading.Event) -> None:
    assert gate.wait(DEADLINE_S)


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_by_seconds_all_ranks_take_the_same_step_whatever_their_clocks_say(tmp_path: Path) -> None:
    ranks = world(tmp_path, 3, every="10s")
    clocks = [Clock() for _ in ranks]
    for rank, clock, speed in zip(ranks, clocks, (1.0, 3.0, 0.1), strict=True):
        rank.checkpointer._clock = clock
        rank.checkpointer._last_due_s = 0.0
        rank.speed = speed  # type: ignore[attr-defined]

    def act(rank: Rank) -> None:
        rank.begin()
        for _ in range(45):
            rank.checkpointer._clock.now_s += 1.0 * rank.speed  # type: ignore[attr-defined]
            rank.step()

    run_ranks(ranks, act)
    found = catalogue.find(LocalStorage(tmp_path))
    assert all(f.is_complete for f in found)
    assert found[0].place.name.step in range(39, 42)
    assert 9 <= found[0].place.name.step - found[1].place.name.step <= 11


def test_newcomers_learn_the_run_at_their_first_commit(tmp_path: Path) -> None:
    together(world(tmp_path, 2), 2, begin=True)
    ranks = world(tmp_path, 2)
    ranks[0].begin = lambda: None  # type: ignore[method-assign]
    holder = Rank(tmp_path, None)
    holder.begin()
    assert holder.checkpointer.run == 2
    ranks[0].checkpointer.run = 2
    for rank in ranks:
        rank.name = holder.name
        rank.training = holder.training if rank is ranks[0] else Training("adam", 1)
        if rank is not ranks[0]:
            rank.training.registry.restore(holder.training.registry.capture())
    together(ranks, 2)
    assert {rank.checkpointer.run for rank in ranks} == {2}
    newest = catalogue.find(LocalStorage(tmp_path))[0]
    assert newest.place.run == 2 and newest.is_complete


def test_a_busy_writer_leaves_one_out_and_says_so_once(tmp_path: Path) -> None:
    (rank,) = world(tmp_path, 1, every="1")
    rank.begin()
    gate = threading.Event()
    rank.checkpointer.writer._at_edge = lambda edge: _pass(gate)
    for _ in range(4):
        rank.step(settle=False)
    assert rank.checkpointer.writer.saved == Saved(
        0, "the checkpoint of step 4 is left out: the one before is still being written"
    )
    gate.set()
    assert rank.checkpointer.writer.wait(DEADLINE_S)
    rank.step()
    assert rank.checkpointer.writer.saved == Saved(5, "")
    assert steps_on_disk(tmp_path) == [5, 1]
    assert len(rank.said) == 1 and "step 2 is left out" in rank.said[0]
    second = Rank(tmp_path, None, seed=3)
    second.begin()
    assert form(second) == form(rank)


def test_while_one_rank_still_writes_all_leave_a_checkpoint_out(tmp_path: Path) -> None:
    """Else one with slow storage writes parts of other checkpoints than the rest, and none is complete."""
    ranks = world(tmp_path, 2, every="1")
    together(ranks, begin=True)
    gate = threading.Event()
    ranks[1].checkpointer.writer._at_edge = lambda edge: _pass(gate)
    run_ranks(ranks, lambda rank: [rank.step(settle=False) for _ in range(3)])
    assert ranks[0].checkpointer.writer.wait(DEADLINE_S)
    assert {found.place.name.step for found in catalogue.find(LocalStorage(tmp_path))} == {1}
    gate.set()
    assert ranks[1].checkpointer.writer.wait(DEADLINE_S)
    together(ranks, 1)
    assert steps_on_disk(tmp_path) == [4, 1]
    assert len(ranks[1].said) == 1 and "step 2 is left out" in ranks[1].said[0]


def test_a_disk_that_hangs_does_not_keep_the_job(tmp_path: Path) -> None:
    (rank,) = world(tmp_path, 1, every="1")
    rank.begin()
    gate = threading.Event()
    rank.checkpointer.writer._at_edge = lambda edge: _pass(gate)
    rank.step(settle=False)
    rank.checkpointer.finish(rank.moment, rank.training.registry.capture, 0.1)
    assert "given up" in rank.said[-1]
    gate.set()
    assert rank.checkpointer.writer.wait(DEADLINE_S)


def test_a_vanished_directory_is_said_once_and_tried_again(tmp_path: Path) -> None:
    root = tmp_path / "there"
    (rank,) = world(root, 1, every="1")
    rank.begin()
    rank.step()
    shutil.rmtree(root)
    for _ in range(3):
        rank.step()
    assert not root.exists()
    saved = rank.checkpointer.writer.saved
    assert saved.step == 1 and "No such file" in saved.trouble
    assert len(rank.said) == 1 and "step 2 could not be written" in rank.said[0]
    root.mkdir()
    rank.step()
    assert rank.checkpointer.writer.saved == Saved(5, "")
    assert steps_on_disk(root) == [5]
    assert len(rank.said) == 2 and "written again" in rank.said[1]


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("can't allocate memory")])
def test_a_write_without_memory_is_said_once_and_tried_again(tmp_path: Path, error: Exception) -> None:
    """An upload takes two more copies of the part."""
    (rank,) = world(tmp_path, 1, every="1")
    rank.begin()
    rank.step()

    def without_memory(edge: str) -> None:
        raise error

    writer = rank.checkpointer.writer
    writer._at_edge = without_memory
    for _ in range(2):
        rank.step()
    assert writer.saved.step == 1 and "no memory" in writer.saved.trouble
    assert len(rank.said) == 1 and "step 2 could not be written" in rank.said[0]
    writer._at_edge = lambda edge: None
    rank.step()
    assert writer.saved == Saved(4, "")


def test_no_memory_for_the_copy_of_a_part_is_said_once_and_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a loss each survivor copies the whole state, beside one that it may have copied for another."""
    (rank,) = world(tmp_path, 1, every="1")
    rank.begin()
    writer, real = rank.checkpointer.writer, torch.empty

    def without_memory(*size: object, **keywords: object) -> torch.Tensor:
        if keywords.get("dtype") is torch.uint8:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 64 bytes")
        return real(*size, **keywords)  # type: ignore[call-overload, no-any-return]

    with monkeypatch.context() as patched:
        patched.setattr(torch, "empty", without_memory)
        rank.step()
        assert "no memory" in writer.saved.trouble
        rank.step()
        assert writer.saved.step == 0 and "no memory" in writer.saved.trouble
        rank.checkpointer.write_last(rank.moment, rank.training.registry.capture)
        assert "no memory" in rank.checkpointer.is_last_written(rank.moment, DEADLINE_S)

    def without_capture() -> dict[str, Any]:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nMore of it.")

    rank.checkpointer.write_last(rank.moment, without_capture)
    assert writer.saved.trouble.endswith("Tried to allocate 2.00 GiB.")
    assert len(rank.said) == 1 and "step 1 could not be written" in rank.said[0]
    rank.step()
    assert writer.saved == Saved(3, "") and steps_on_disk(tmp_path) == [3]


def test_the_copy_of_a_larger_part_takes_no_memory_beside_the_smaller_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (rank,) = world(tmp_path, 1, every="1")
    rank.begin()
    rank.step()
    before = StorageWeakRef(rank.checkpointer.writer._staging.untyped_storage())  # type: ignore[no-untyped-call]
    rank.training.registry.register("weight", torch.nn.Linear(64, 64))
    real = torch.empty
    expired: list[bool] = []

    def allocate(*size: object, **keywords: object) -> torch.Tensor:
        if keywords.get("dtype") is torch.uint8 and size[0]:
            expired.append(before.expired())  # type: ignore[no-untyped-call]
        return real(*size, **keywords)  # type: ignore[call-overload, no-any-return]

    with monkeypatch.context() as patched:
        patched.setattr(torch, "empty", allocate)
        rank.step(settle=False)
        assert rank.checkpointer.writer.wait(DEADLINE_S)
    assert expired and expired[0]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_writer_that_ended_by_a_defect_is_replaced(tmp_path: Path) -> None:
    (rank,) = world(tmp_path, 1, every="1")
    rank.begin()
    writer = rank.checkpointer.writer

    def defect(edge: str) -> None:
        raise ZeroDivisionError

    writer._at_edge = defect
    rank.step()
    assert writer.saved.step == 0 and "ZeroDivisionError" in writer.saved.trouble
    writer._at_edge = lambda edge: None
    rank.step()
    assert writer.saved == Saved(2, "")


FULL_DISK = """
import subprocess, sys
from pathlib import Path
import torch
torch.set_num_threads(1)
from bagua_core.elastic.checkpoint import catalogue
from bagua_core.elastic.checkpoint.local_storage import LocalStorage
from tests.core.elastic.checkpoint.checkpoint_worlds import Rank

root = Path(sys.argv[1])
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=512k", "none", str(root)], check=True)
rank = Rank(root, None, every="1")
rank.training.registry.register("weight", torch.nn.Linear(256, 256))  # a state of 256 KiB
rank.begin()
rank.step()
assert [f.place.name.step for f in catalogue.find(LocalStorage(root)) if f.is_complete] == [1], rank.said
rank.step()
rank.step()
assert [f.place.name.step for f in catalogue.find(LocalStorage(root)) if f.is_complete] == [1]
assert len(rank.said) == 1 and f"written: {root}: [Errno 28] No space left" in rank.said[0], rank.said
assert not list(root.glob("*/.*")), "the half part takes no room"
subprocess.run(["mount", "-o", "remount,size=64m", str(root)], check=True)
rank.step()
assert [f.place.name.step for f in catalogue.find(LocalStorage(root)) if f.is_complete] == [4, 1]
again = Rank(root, None, seed=2)
again.training.registry.register("weight", torch.nn.Linear(256, 256))
again.begin()
assert again.name.step == 4
print("all well")
"""


@pytest.mark.skipif(shutil.which("unshare") is None, reason="needs util-linux")
def test_a_full_disk_is_said_once_and_tried_again(tmp_path: Path) -> None:
    probe = subprocess.run(["unshare", "-m", "true"], capture_output=True, check=False, timeout=HANG_S)
    if probe.returncode != 0:
        pytest.skip("needs the right to make mount namespaces")
    ended = subprocess.run(
        ["unshare", "-m", sys.executable, "-c", FULL_DISK, str(tmp_path)],
        env={"PYTHONPATH": f"{ROOT}:{ROOT / 'protos'}", "PATH": "/usr/sbin:/usr/bin:/sbin:/bin"},
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
    )
    assert ended.stdout.strip() == "all well", ended.stderr


def test_the_pause_is_the_copy_of_the_stripe() -> None:
    """Measured, with room: not the state's size counts but the stripe's."""
    state = {
        "modules": [{"parameter.w": torch.randn(4 << 20)}],
        "optimizers": [],
        "registered": {},
    }
    whole, quarter = layout.stripe(state, 0, 1), layout.stripe(state, 3, 4)
    assert whole.size_bytes - len(whole.manifest) == 16 << 20 and quarter.size_bytes == 4 << 20


def test_places_are_ordered_by_run_first() -> None:
    name = Rank(Path("/nonexistent/never"), None).name
    assert RunState(2, name) > RunState(1, name)
