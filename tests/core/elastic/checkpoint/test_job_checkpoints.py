"""A generation without a holder continues from a checkpoint, also if some members can't read it."""

from __future__ import annotations

import errno
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from bagua_contract.environment import WorkerEnvironment
from bagua_contract.records import Generation, GenerationKind, StateName
from bagua_core.communication.communicator import CollectiveFailed, Communicator, Pending
from bagua_core.elastic.checkpoint import catalogue
from bagua_core.elastic.checkpoint.checkpointer import Settings
from bagua_core.elastic.checkpoint.job_checkpoints import JobCheckpoints, settings_of
from bagua_core.elastic.checkpoint.local_storage import LocalStorage
from bagua_core.elastic.checkpoint.restore import CheckpointMismatch
from bagua_core.elastic.heal.heal_plan import HealPlan, StateGone
from bagua_core.elastic.ledger.ledger import Resumption
from bagua_core.elastic.membership import entry
from bagua_core.elastic.membership.member import Member
from bagua_core.elastic.state.committed_state import CommittedState, Remains
from tests.core.communication.in_process import build_in_process
from tests.core.communication.worlds import run_ranks
from tests.core.elastic.checkpoint.checkpoint_worlds import DEADLINE_S, together, world
from tests.core.elastic.records import generation
from tests.core.elastic.state.trainings import Training, wire_form


class FakeMember:
    """What the checkpoints ask of a member."""

    def __init__(self, communicator: Communicator, record: Generation) -> None:
        self.communicator = communicator
        self.generation = record
        self.replica = None
        self.broken = False
        self.changed = threading.Condition()

    def wait(self, pending: Pending) -> None:
        pending.wait()

    wait_unlearned = wait

    def wait_for_transfer(self, done: Callable[[], bool]) -> None:
        with self.changed:
            assert self.changed.wait_for(done, DEADLINE_S)

    def break_generation(self, error: Exception) -> None:
        self.broken = True


class Worker:
    def __init__(self, settings: Settings | None, communicator: Communicator, record: Generation) -> None:
        self.training = Training("adam", 50 + communicator.global_rank)
        self.state = CommittedState()
        self.state.registry = self.training.registry
        self.record = record
        self.member = FakeMember(communicator, record)
        self.lines: list[Resumption] = []
        self.said: list[str] = []
        self.checkpoints = JobCheckpoints(
            settings,
            self.state,
            cast(Member, self.member),
            self.swap_in,
            self.info,
            self.lines.append,
            self.training.registry.fingerprint,
            self.said.append,
        )

    def swap_in(self, copied: Any) -> None:
        self.state.restore(copied, "", {})

    def info(self) -> entry.Info:
        return entry.Info(
            self.state.name, False, self.state.position, remains=self.state.remains, run=self.state.run
        )

    def enter(self) -> HealPlan:
        plan, infos = entry.exchange(
            self.member.communicator, self.record, self.info(), self.member.wait_unlearned
        )
        plan, infos = self.checkpoints.resume(self.record, plan, infos)
        assert len(infos) == self.member.communicator.world_size
        return plan


def workers(settings: Settings | None, size: int, number: int = 1) -> list[Worker]:
    record = generation(number, *[f"w{r}" for r in range(size)], base=0, since=number)
    return [Worker(settings, c, record) for c in build_in_process(size, number)]


def settings(root: Path) -> Settings:
    found = settings_of(environment(checkpoint_dir=str(root), checkpoint_every="2"))
    assert found is not None
    return found


def environment(**fields: Any) -> WorkerEnvironment:
    return WorkerEnvironment("job", "w", "a", "socket", "127.0.0.1", 0, 1, **fields)


def test_all_read_it_and_are_holders(tmp_path: Path) -> None:
    first = world(tmp_path, 2)
    together(first, 4, begin=True)
    here = workers(settings(tmp_path), 3)
    plans = run_ranks(here, Worker.enter)
    assert {plan.holders for plan in plans} == {(0, 1, 2)} and not plans[0].initial
    for worker in here:
        assert worker.state.name == StateName(1, 4, 0) and worker.state.position == {"epoch": 0, "batch": 4}
        assert wire_form(worker.training.registry.capture()) == wire_form(
            first[0].training.registry.capture()
        )
        (line,) = worker.lines
        assert (line.job, line.generation, line.run, line.resumed_at_step) == ("nonce", 1, 2, 4)


@pytest.mark.parametrize("cannot", [{0}, {1, 2}])
def test_who_cannot_read_it_copies_from_those_who_can(tmp_path: Path, cannot: set[int]) -> None:
    together(world(tmp_path, 2), 4, begin=True)
    here = workers(settings(tmp_path), 3)
    for r in cannot:
        here[r].checkpoints._checkpointer.read = lambda choice: None  # type: ignore[method-assign]
    plans = run_ranks(here, Worker.enter)
    assert all(plan.newcomers == cannot for plan in plans)
    assert all(set(plan.holders) == {0, 1, 2} - cannot for plan in plans)
    assert len({worker.lines[0].run for worker in here}) == 1


def test_if_no_member_can_read_it_the_next_older_one_is_taken(tmp_path: Path) -> None:
    together(world(tmp_path, 2), 4, begin=True)
    (newest,) = tmp_path.glob("run-0001-step-000000004-*")
    part = newest / "part-00001-of-00002.safetensors"
    part.write_bytes(part.read_bytes()[:-1] + b"\xff")
    here = workers(settings(tmp_path), 2)
    run_ranks(here, Worker.enter)
    assert {worker.state.name.step for worker in here} == {2}
    assert {worker.lines[0].resumed_at_step for worker in here} == {2}


def test_an_exit_in_the_thread_that_reads_it_does_not_end_the_script_by_its_code(tmp_path: Path) -> None:
    together(world(tmp_path, 1), 4, begin=True)
    (worker,) = workers(settings(tmp_path), 1)
    worker.checkpoints._checkpointer.read = lambda choice: sys.exit(0)  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match=r"SystemExit\(0\)"):
        worker.enter()


def test_without_any_checkpoint_the_job_begins(tmp_path: Path) -> None:
    here = workers(settings(tmp_path), 2)
    assert all(plan.initial for plan in run_ranks(here, Worker.enter))
    assert [worker.lines[0].resumed_at_step for worker in here] == [0, 0]
    off = workers(None, 2)
    assert all(plan.initial for plan in run_ranks(off, Worker.enter))
    assert off[0].lines == []


def left_out(here: list[Worker]) -> None:
    """Each has trained in the job, which went on without it."""
    for worker in here:
        worker.state.name = StateName(3, 40, 0)
        worker.state.forget()


@pytest.mark.parametrize("saves", [True, False])
def test_what_workers_trained_before_they_were_left_out_is_no_beginning(tmp_path: Path, saves: bool) -> None:
    here = workers(settings(tmp_path) if saves else None, 2, number=7)
    left_out(here[:1])
    assert all((plan.initial, plan.holders) == (True, (1,)) for plan in run_ranks(here, Worker.enter))
    left_out(here)

    def ends(worker: Worker) -> bool:
        with pytest.raises(StateGone, match="begins anew"):
            worker.enter()
        return True

    assert all(run_ranks(here, ends))


def test_workers_that_were_left_out_go_on_from_a_checkpoint(tmp_path: Path) -> None:
    together(world(tmp_path, 2), 4, begin=True)
    here = workers(settings(tmp_path), 2, number=7)
    left_out(here)
    run_ranks(here, Worker.enter)
    assert {worker.state.name for worker in here} == {StateName(7, 4, 0)}
    assert {worker.state.remains for worker in here} == {Remains.UNTOUCHED}


def test_a_worker_that_was_left_out_brings_no_gradients_to_the_state_of_a_checkpoint(tmp_path: Path) -> None:
    (writer,) = trained(tmp_path, 1)
    writer.checkpoints.step_aside(writer.record, 0, 1, NO_LIMIT)
    assert written_by([writer]) == [True]
    ended([writer])
    here = workers(settings(tmp_path), 2, number=7)
    commit_step(here[0])
    left_out(here[:1])
    run_ranks(here, Worker.enter)
    states = [worker.training.registry.gradients() for worker in here]
    assert states == [[{}], [{}]]
    for worker in here:  # samples under no_sync() of the next step
        worker.training.model(torch.ones(8, 4)).sum().backward()
    assert all("gradients" in worker.training.registry.capture_for_checkpoint() for worker in here)


def test_a_later_generation_from_a_checkpoint_takes_nothing_of_what_was_kept(tmp_path: Path) -> None:
    together(world(tmp_path, 2), 4, begin=True)
    here = workers(settings(tmp_path), 2, number=7)
    here[1].state.name = StateName(6, 40, 0)  # a survivor that the job gave up
    run_ranks(here, Worker.enter)
    assert {worker.state.name for worker in here} == {StateName(7, 4, 0)}


def test_a_joiner_that_outlives_all_others_goes_on_with_their_run(tmp_path: Path) -> None:
    """They are lost between its first commit and the exchange behind it, in which members agree on what is written."""
    together(world(tmp_path, 1), 4, begin=True)
    (holder,) = workers(settings(tmp_path), 1)
    holder.enter()
    assert holder.state.name.step == 4
    first, second = build_in_process(2, 2)
    record = generation(2, "w0", "w1", since={"w0": 1})
    holder.member.communicator, holder.record = first, record
    joiner = Worker(settings(tmp_path), second, record)
    run_ranks([holder, joiner], Worker.enter)
    copied = {"name": [1, 4, 0], "history": "[]", "operations": [], "final_parts": 0, "owes": [False, False]}
    joiner.swap_in({**holder.training.registry.capture(), **copied})
    joiner.state.step_committed(2)

    (alone,) = build_in_process(1, 3)
    joiner.member.communicator = alone
    joiner.member.generation = joiner.record = generation(3, "w1", since={"w1": 2})
    assert not joiner.enter().initial
    joiner.state.step_committed(3)
    assert joiner.checkpoints.is_due()
    joiner.checkpoints.write(0, 1)
    ended([holder, joiner])
    newest = catalogue.newest_complete(catalogue.find(LocalStorage(tmp_path)))
    assert newest is not None and (newest.place.run, newest.place.name.step) == (2, 6)


def test_what_cannot_be_agreed_on_breaks_the_generation(tmp_path: Path) -> None:
    (worker,) = workers(settings(tmp_path), 1)
    worker.enter()
    worker.state.step_committed(1)

    class Broken:
        global_rank, world_size = 0, 1

        def allgather(self, *arguments: object) -> Pending:
            raise CollectiveFailed("a test")

    worker.member.communicator = cast(Communicator, Broken())
    assert not worker.checkpoints.is_due()
    assert worker.member.broken


NO_LIMIT = float("inf")


def trained(root: Path, size: int) -> list[Worker]:
    """Workers of equal state that have committed a step; without periodic checkpoints."""
    here = workers(settings(root), size)
    run_ranks(here, Worker.enter)
    for worker in here:
        worker.training.registry.restore(here[0].training.registry.capture())
        worker.state.step_committed(1)
    return here


def ended(here: list[Worker]) -> None:
    for worker in here:
        worker.checkpoints.close()


def test_those_who_step_aside_together_write_one_checkpoint(tmp_path: Path) -> None:
    here = trained(tmp_path, 2)
    for rank, worker in enumerate(here):
        worker.checkpoints.step_aside(worker.record, rank, 2, NO_LIMIT)
    last = [worker.checkpoints.before_leaving(time.monotonic() + DEADLINE_S) for worker in here]
    assert [(x.part, x.parts, x.written, x.state.step) for x in last if x] == [
        (0, 2, True, 1),
        (1, 2, True, 1),
    ]
    (found,) = catalogue.find(LocalStorage(tmp_path))
    assert found.is_complete and found.place.name == StateName(1, 1, 0)
    ended(here)


def test_optimizer_steps_of_a_failed_step_that_are_final_are_not_done_again_after_a_resume(
    tmp_path: Path,
) -> None:
    here = trained(tmp_path, 2)
    for rank, worker in enumerate(here):
        worker.state.part_committed(1, 1)
        worker.checkpoints.step_aside(worker.record, rank, 2, NO_LIMIT)
    assert all(worker.checkpoints.before_leaving(time.monotonic() + DEADLINE_S) for worker in here)
    ended(here)
    resumed = workers(settings(tmp_path), 3)
    run_ranks(resumed, Worker.enter)
    assert [(w.state.name.step, w.state.final_parts) for w in resumed] == [(1, 1)] * 3


def test_a_script_whose_optimizer_has_its_parameters_in_another_order_is_refused(tmp_path: Path) -> None:
    """Two of them have one shape, so each would load the other's moments."""
    (writer,) = here = trained(tmp_path, 1)
    writer.checkpoints.step_aside(writer.record, 0, 1, NO_LIMIT)
    assert written_by(here) == [True]
    ended(here)
    (worker,) = workers(settings(tmp_path), 1)
    parameters = worker.training.optimizer.param_groups[0]["params"]
    parameters[2], parameters[3] = parameters[3], parameters[2]
    before = wire_form(worker.training.registry.capture())
    with pytest.raises(CheckpointMismatch, match=r"parameter 2 of optimizer 0 is norm.weight, .* norm.bias"):
        worker.enter()
    assert wire_form(worker.training.registry.capture()) == before


def test_survivors_of_a_loss_each_write_the_whole_state_at_once(tmp_path: Path) -> None:
    here = trained(tmp_path, 3)
    run_ranks(here, lambda worker: worker.checkpoints.step_aside(worker.record, 0, 1, NO_LIMIT))
    last = [worker.checkpoints.before_leaving(time.monotonic() + DEADLINE_S) for worker in here]
    assert [(x.part, x.parts, x.written) for x in last if x] == [(0, 1, True)] * 3
    assert [f.is_complete for f in catalogue.find(LocalStorage(tmp_path))] == [True]
    ended(here)


def test_written_again_by_more_workers_it_counts_if_either_is_whole(tmp_path: Path) -> None:
    """A state that stepped aside in two parts, and is due as a checkpoint once three workers have it."""
    two, three = trained(tmp_path, 2), trained(tmp_path, 3)
    two[0].checkpoints._checkpointer.run = three[0].checkpoints._checkpointer.run
    two[0].checkpoints.step_aside(two[0].record, 0, 2, NO_LIMIT)  # the other part is missing
    for rank, worker in enumerate(three):
        worker.checkpoints.step_aside(worker.record, rank, 3, NO_LIMIT)
    for worker in (two[0], *three):
        assert worker.checkpoints.before_leaving(NO_LIMIT)
    assert [f.is_complete for f in catalogue.find(LocalStorage(tmp_path))] == [True]
    ended([*two, *three])


@pytest.mark.parametrize("change", ["none", "gradients", "values", "layout"])
def test_the_last_checkpoint_is_of_one_state_or_not_written(tmp_path: Path, change: str) -> None:
    here = trained(tmp_path, 2)
    if change == "gradients":  # of samples under no_sync()
        for rank, worker in enumerate(here):
            worker.training.model(torch.full((8, 4), float(rank))).sum().backward()
    if change == "values":
        here[0].training.model.last.bias.data.add_(1.0)
    if change == "layout":
        here[0].training.model.half()
    digests = torch.stack([worker.checkpoints.digests() for worker in here])
    run_ranks(here, lambda worker: worker.checkpoints.finish(here.index(worker), 2, digests))
    found = catalogue.find(LocalStorage(tmp_path))
    if change in ("none", "gradients"):
        assert [one.is_complete for one in found] == [True] and here[0].said == []
    else:
        assert found == []
        assert any("the job's last checkpoint, of step 1, is not written" in text for text in here[0].said)


def test_a_disk_that_does_not_take_it_is_told(tmp_path: Path) -> None:
    (worker,) = here = trained(tmp_path, 1)
    shutil.rmtree(tmp_path)
    worker.checkpoints.step_aside(worker.record, 0, 1, NO_LIMIT)
    last = worker.checkpoints.before_leaving(time.monotonic() + DEADLINE_S)
    assert last is not None and not last.written and "No such file" in last.problem
    assert any("the last checkpoint, of step 1, is not written: " in text for text in worker.said)
    ended(here)


def test_too_little_time_is_told_before_and_after(tmp_path: Path) -> None:
    (worker,) = here = trained(tmp_path, 1)
    worker.checkpoints._checkpointer.writer.write_s = 60.0
    worker.checkpoints.step_aside(worker.record, 0, 1, time.monotonic() + 2.0)
    assert any(
        "it takes about 60.0 s" in text and "give a longer --shutdown-timeout" in text for text in worker.said
    )
    ended(here)


def test_without_checkpoints_only_the_name_is_told(tmp_path: Path) -> None:
    (worker,) = workers(None, 1)
    worker.checkpoints.step_aside(worker.record, 0, 1, NO_LIMIT)
    assert worker.checkpoints.before_leaving(NO_LIMIT) is None, "it holds no state"
    worker.state.step_committed(1)
    worker.checkpoints.step_aside(worker.record, 0, 1, NO_LIMIT)
    last = worker.checkpoints.before_leaving(NO_LIMIT)
    assert last is not None and (last.state.step, last.parts, last.written, last.problem) == (1, 0, False, "")


def test_begun_anew_voids_what_was_done_before(tmp_path: Path) -> None:
    here = workers(None, 2, number=4)
    for worker in here:
        worker.record = replace(
            worker.record, kind=GenerationKind.FAILOVER, reason="anew, since all have left"
        )
    assert all(plan.initial for plan in run_ranks(here, Worker.enter))
    assert [(x.job, x.generation, x.resumed_at_step) for x in here[0].lines] == [("nonce", 4, 0)]
    assert here[0].said == ["begins at step 0: anew, since all have left"]


def test_a_first_generation_that_is_replaced_before_it_trains_says_nothing() -> None:
    here = workers(None, 2, number=2)
    assert all(plan.initial for plan in run_ranks(here, Worker.enter))
    assert here[0].lines == [] and here[0].said == []


def test_settings() -> None:
    assert settings_of(environment()) is None
    with pytest.raises(ValueError, match="neither"):
        settings_of(environment(checkpoint_dir="x", checkpoint_every="often"))


def test_a_periodic_part_of_the_same_state_is_not_the_last_checkpoint(tmp_path: Path) -> None:
    """Part 1 of 2 is on disk; the whole state, which is all that could be restored, is not."""
    here = trained(tmp_path, 2)
    second = here[1]
    second.checkpoints.step_aside(second.record, 1, 2, NO_LIMIT)
    whole = second.checkpoints.before_leaving(time.monotonic() + DEADLINE_S)
    assert whole is not None and whole.written and (whole.part, whole.parts) == (1, 2)
    shutil.rmtree(tmp_path)
    second.checkpoints.step_aside(second.record, 0, 1, NO_LIMIT)
    last = second.checkpoints.before_leaving(time.monotonic() + DEADLINE_S)
    assert last is not None and not last.written and "No such file" in last.problem
    ended(here)


def commit_step(worker: Worker) -> None:
    """A step whose gradients the optimizer has used, and the script has not cleared."""
    training = worker.training
    training.registry.snapshot()
    training.registry.backward_begins()
    training.train(1, seed=5)
    training.registry.stepped(training.optimizer)
    training.registry.step_committed()
    worker.state.step_committed(1)


class NoDisk(LocalStorage):
    def write(self, *arguments: Any) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))


def take_disk_away(monkeypatch: pytest.MonkeyPatch, worker: Worker, root: Path) -> None:
    monkeypatch.setattr(worker.checkpoints._checkpointer.writer, "_storage", NoDisk(root))


def written_by(here: list[Worker]) -> list[bool]:
    last = [worker.checkpoints.before_leaving(time.monotonic() + DEADLINE_S) for worker in here]
    return [of_one is not None and of_one.written for of_one in last]


def test_a_last_checkpoint_that_fails_leaves_the_complete_one_of_the_same_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = trained(tmp_path, 2)
    for rank, worker in enumerate(here):
        commit_step(worker)
        worker.checkpoints.write(rank, 2)
        assert worker.checkpoints._checkpointer.writer.wait(DEADLINE_S)
    take_disk_away(monkeypatch, here[1], tmp_path)
    for rank, worker in enumerate(here):
        worker.checkpoints.step_aside(worker.record, rank, 2, NO_LIMIT)
    assert written_by(here) == [True, True], "each part of this state is on disk"
    (found,) = catalogue.find(LocalStorage(tmp_path))
    assert found.is_complete
    ended(here)


def test_a_last_part_completes_a_periodic_checkpoint_of_the_same_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = trained(tmp_path, 2)
    with monkeypatch.context() as away:
        take_disk_away(away, here[1], tmp_path)
        for rank, worker in enumerate(here):
            commit_step(worker)
            worker.checkpoints.write(rank, 2)
            assert worker.checkpoints._checkpointer.writer.wait(DEADLINE_S)
    here[1].training.optimizer.zero_grad()  # the scripts are at different places
    for rank, worker in enumerate(here):
        worker.checkpoints.step_aside(worker.record, rank, 2, NO_LIMIT)
    assert written_by(here) == [True, True]
    (found,) = catalogue.find(LocalStorage(tmp_path))
    assert found.is_complete
    ended(here)
