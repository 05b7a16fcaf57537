"""The order of collectives does not depend on durations, and no operation of a broken communicator continues."""

from __future__ import annotations

import gc
import os
import signal
import threading
import weakref

import pytest
import torch

from bagua_core.communication.communicator import CollectiveAborted, CollectiveFailed, Communicator, Pending
from bagua_core.communication.pending import DonePending
from bagua_core.communication.reduction.operation_queue import Job, OperationQueue, operation_queue_of
from tests.core.communication.in_process import InProcessCommunicator, build_in_process
from tests.core.communication.worlds import DEADLINE_S, await_true, gloo_world, in_process_world, run_ranks


def alone() -> Communicator:
    return in_process_world(1)[0]


def noting(notes: list[str], name: str, waits: int, gate: threading.Event | None = None) -> Job:
    """Writes down each of its parts; the first waits for `gate`."""
    for part in range(waits + 1):
        if gate is not None and part == 0:
            assert gate.wait(DEADLINE_S)
        notes.append(f"{name}{part}")
        if part < waits:
            yield DonePending()


@pytest.mark.parametrize(
    "late", [True, False], ids=["all launched before the first runs", "each when it likes"]
)
def test_each_launch_moves_the_earlier_jobs_on_by_one_wait(late: bool) -> None:
    operation_queue, communicator, notes = OperationQueue(), alone(), list[str]()
    gate = threading.Event()
    pendings: list[Pending] = []
    for name in "abcd":
        pendings.append(operation_queue.launch(communicator, noting(notes, name, 2, gate)))
        if not late:
            gate.set()
            await_true(lambda name=name: f"{name}0" in notes, "it has begun")
    gate.set()
    for pending in pendings:
        pending.wait()
    assert notes == ["a0", "b0", "a1", "c0", "a2", "b1", "d0", "b2", "c1", "c2", "d1", "d2"]


def test_jobs_behind_a_flush_begin_when_those_before_it_have_ended() -> None:
    operation_queue, communicator, notes, gate = OperationQueue(), alone(), list[str](), threading.Event()
    first = [operation_queue.launch(communicator, noting(notes, name, 1, gate)) for name in "ab"]
    operation_queue.flush()
    operation_queue.flush()
    last = operation_queue.launch(communicator, noting(notes, "c", 0))
    gate.set()
    for pending in (last, *first):
        pending.wait()
    assert notes == ["a0", "b0", "a1", "b1", "c0"]


def test_an_unflushed_job_stands_still_until_a_wait() -> None:
    operation_queue, notes = OperationQueue(), list[str]()
    pending = operation_queue.launch(alone(), noting(notes, "a", 1))
    await_true(lambda: notes == ["a0"], "it has begun")
    assert not pending.is_done()
    pending.wait()
    assert pending.is_done()
    pending.wait()
    assert notes == ["a0", "a1"]


def reducing(communicator: Communicator, tensor: torch.Tensor) -> Job:
    yield communicator.allreduce(tensor)
    tensor.mul_(10)
    yield communicator.allreduce(tensor)


@pytest.mark.parametrize("build", [in_process_world, gloo_world])
def test_ranks_of_different_pace_match_their_collectives(build: object) -> None:
    world = in_process_world(3) if build is in_process_world else list(gloo_world(3))
    slow = threading.Event()

    def act(communicator: Communicator) -> list[float]:
        operation_queue = OperationQueue()
        tensors = [torch.full((2 + i,), float(i + communicator.global_rank)) for i in range(6)]
        pendings = []
        for i, tensor in enumerate(tensors):
            if communicator.global_rank == 2 and i == 3:
                assert slow.wait(DEADLINE_S)
            pendings.append(operation_queue.launch(communicator, reducing(communicator, tensor)))
        if communicator.global_rank == 0:
            slow.set()  # rank 0 has launched all of its own by now
        for pending in pendings:
            pending.wait()
        return [t[0].item() for t in tensors]

    found = run_ranks(world, act)
    assert found == [[30.0 * (3 * i + 3) for i in range(6)]] * 3


def test_an_abort_releases_the_waits_and_the_thread_goes_on() -> None:
    (here, _), operation_queue = in_process_world(2), OperationQueue()  # the peer is silent for ever
    pending = operation_queue.launch(here, reducing(here, torch.ones(1)))
    waiting = threading.Event()
    errors: list[Exception] = []

    def wait() -> None:
        try:
            pending.wait(lambda _: waiting.set(), 0.01)
        except CollectiveFailed as error:
            errors.append(error)

    waiter = threading.Thread(target=wait)
    waiter.start()
    assert waiting.wait(DEADLINE_S), "the waiter reports that the wait lasts"
    here.abort("the generation is over")
    waiter.join(DEADLINE_S)
    assert [type(e) for e in errors] == [CollectiveAborted]
    notes: list[str] = []
    operation_queue.launch(alone(), noting(notes, "a", 1)).wait()
    assert notes == ["a0", "a1"]
    with pytest.raises(CollectiveAborted):
        pending.wait()


class RuinedError(Exception):
    """A job's own mistake."""


def ruined(first: Pending) -> Job:
    yield first
    raise RuinedError("no such kernel")


def test_the_wait_for_an_older_job_shows_the_mistake_of_a_newer_one() -> None:
    """A reducer waits for its first bucket first: a hook's own mistake in the second is no lost network."""
    operation_queue, here, notes, gate = OperationQueue(), alone(), list[str](), threading.Event()
    older = operation_queue.launch(here, noting(notes, "a", 3, gate))
    failing = operation_queue.launch(here, ruined(DonePending()))
    later = operation_queue.launch(here, noting(notes, "b", 1))
    gate.set()
    for pending in (older, failing):
        with pytest.raises(RuinedError, match="no such kernel"):
            pending.wait()
    with pytest.raises(CollectiveFailed, match="an operation before it failed"):
        later.wait()


@pytest.mark.parametrize("how", ["collective", "own"])
def test_after_a_failure_no_job_of_that_communicator_goes_on(how: str) -> None:
    world = build_in_process(2)
    here: InProcessCommunicator = world[0]
    operation_queue, notes, gate = OperationQueue(), list[str](), threading.Event()
    if how == "collective":
        failing = operation_queue.launch(here, reducing(here, torch.ones(1)))
    else:
        failing = operation_queue.launch(here, ruined(DonePending()))
    beside = operation_queue.launch(here, noting(notes, "a", 3, gate))
    other = operation_queue.launch(alone(), noting(notes, "x", 1))
    later = operation_queue.launch(here, noting(notes, "b", 1))
    if how == "collective":
        world[1].lose("10.0.0.2")
    gate.set()
    with pytest.raises(CollectiveFailed if how == "collective" else RuinedError):
        failing.wait()
    for pending in (beside, later):
        with pytest.raises(CollectiveFailed, match=r"closed by peer|an operation before it failed"):
            pending.wait()
    other.wait()
    assert notes[0] == "a0" and "x1" in notes and not {"a3", "b0"} & set(notes)
    with pytest.raises(CollectiveFailed):
        operation_queue.launch(here, noting(notes, "c", 0)).wait()
    fresh = alone()
    operation_queue.launch(fresh, noting(notes, "d", 0)).wait()
    assert "d0" in notes
    watched = weakref.ref(here)
    del here, world, failing, beside, later, pending
    gc.collect()
    await_true(lambda: watched() is None, "the broken communicator is let go")


def test_idle_it_holds_no_communicator_and_its_thread_ends_with_it() -> None:
    operation_queue, communicator = OperationQueue(), alone()
    pending = operation_queue.launch(communicator, reducing(communicator, torch.ones(1)))
    pending.wait()
    threads = [t for t in threading.enumerate() if t.name == "bagua-operations"]
    assert threads
    watched = weakref.ref(communicator)
    del communicator
    gc.collect()
    await_true(lambda: watched() is None, "the communicator is let go while a ticket is still held")
    del pending, operation_queue
    gc.collect()
    await_true(
        lambda: sum(t.name == "bagua-operations" for t in threading.enumerate()) < len(threads),
        "a thread ended",
    )


def test_an_engine_has_one() -> None:
    class Engine:
        pass

    first, second = Engine(), Engine()
    assert operation_queue_of(first) is operation_queue_of(first)
    assert operation_queue_of(first) is not operation_queue_of(second)


def test_a_forked_child_has_a_thread_of_its_own() -> None:
    operation_queue = OperationQueue()
    communicator = alone()
    operation_queue.launch(communicator, noting([], "a", 1)).wait()
    pid = os.fork()
    if pid == 0:
        signal.alarm(int(DEADLINE_S))
        notes: list[str] = []
        operation_queue.launch(communicator, noting(notes, "b", 1)).wait()
        os._exit(0 if notes == ["b0", "b1"] else 1)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0
