"""The public collectives, by workers in threads: what each gives, and what a loss in the middle makes of it."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch

import bagua_core as bagua
from bagua_core.elastic.script_collectives.outside_collectives import SourceHasNoState
from bagua_core.elastic.state.state_codec import StateCodecError
from bagua_core.elastic.step import runtime
from bagua_core.elastic.step.engine import Engine
from tests.core.communication.worlds import await_true, run_ranks
from tests.core.elastic.worlds_of_workers import Job, Worker, run

ROOT = 1


@pytest.fixture(autouse=True)
def engine_of_thread(monkeypatch: pytest.MonkeyPatch) -> threading.local:
    local = threading.local()
    monkeypatch.setattr(runtime, "engine", lambda: local.engine)
    monkeypatch.setattr(Worker, "thread", local, raising=False)
    return local


def acting(act: Callable[[Worker], Any]) -> Callable[[Worker], Any]:
    """`act` as the script of that worker: bagua's functions are its own in this thread."""

    def as_script(worker: Worker) -> Any:
        def place() -> tuple[int, int]:
            workers = worker.collectives._workers()
            own = worker.collectives._own_id
            return (workers.index(own), len(workers)) if own in workers else (0, 1)

        worker.thread.engine = SimpleNamespace(collectives=worker.collectives, place_of_script=place)  # type: ignore[attr-defined]
        try:
            return act(worker)
        except BaseException:
            worker.job.give_up()
            raise

    return as_script


def rank_of(worker: Worker) -> int:
    assert worker.communicator is not None
    return worker.communicator.global_rank


# Every collective of all workers, with an input that shows who it came from. Not in place.
CALLS: dict[str, Callable[[int, int], Any]] = {
    "allreduce": lambda rank, size: bagua.allreduce(torch.tensor([rank + 1.0])),
    "reduce": lambda rank, size: bagua.reduce(torch.tensor([rank + 1.0]), ROOT),
    "reduce_scatter": lambda rank, size: bagua.reduce_scatter(torch.arange(size * 1.0) + rank),
    "broadcast": lambda rank, size: bagua.broadcast(torch.tensor([rank]), ROOT),
    "broadcast_object": lambda rank, size: bagua.broadcast_object({"rank": rank}, ROOT),
    "allgather": lambda rank, size: bagua.allgather(torch.tensor([rank])),
    "gather": lambda rank, size: bagua.gather(torch.tensor([rank]), ROOT),
    "scatter": lambda rank, size: bagua.scatter(
        torch.tensor(-1), torch.arange(size) * 10 if rank == ROOT else None, ROOT
    ),
    "alltoall": lambda rank, size: bagua.alltoall(torch.arange(size) + 10 * rank),
    "alltoall_v": lambda rank, size: bagua.alltoall_v(torch.full((size * rank,), rank), [rank] * size),
    "barrier": lambda rank, size: bagua.barrier(),
}
CUT = {"reduce_scatter", "scatter", "alltoall", "alltoall_v"}
ROOTED = {"reduce", "broadcast", "broadcast_object", "gather", "scatter"}


def expected(name: str, rank: int, size: int) -> Any:
    ranks = list(range(size))
    return {
        "allreduce": [sum(r + 1.0 for r in ranks)],
        "reduce": [sum(r + 1.0 for r in ranks)] if rank == ROOT else None,
        "reduce_scatter": sum(rank + 1.0 * r for r in ranks),
        "broadcast": [ROOT],
        "broadcast_object": {"rank": ROOT},
        "allgather": [[r] for r in ranks],
        "gather": [[r] for r in ranks] if rank == ROOT else None,
        "scatter": 10 * rank,
        "alltoall": [rank + 10 * r for r in ranks],
        "alltoall_v": ([r for r in ranks for _ in range(r)], ranks),
        "barrier": None,
    }[name]


def plain(result: Any) -> Any:
    if isinstance(result, tuple):
        return tuple(plain(each) for each in result)
    return result.tolist() if isinstance(result, torch.Tensor) else result


# -- what each gives


@pytest.mark.parametrize("in_step", [False, True], ids=["outside", "in a step"])
@pytest.mark.parametrize("name", list(CALLS))
def test_every_rank_gets_its_part(name: str, in_step: bool) -> None:
    job = Job(3)

    def act(worker: Worker) -> Any:
        worker.in_step = in_step
        return plain(CALLS[name](rank_of(worker), 3))

    assert run(job, acting(act)) == [expected(name, r, 3) for r in range(3)]
    assert all(w.operations == ([] if in_step else [0]) for w in job.workers)


def test_in_place_writes_into_the_argument_and_leaves_other_rows() -> None:
    job = Job(3)

    def act(worker: Worker) -> None:
        rank = rank_of(worker)
        tensor = torch.tensor([rank + 1.0])
        assert bagua.allreduce_inplace(tensor) is tensor and tensor.tolist() == [6.0]
        tensor = torch.tensor([rank + 1.0])
        bagua.reduce_inplace(tensor, ROOT, bagua.ReduceOp.MAX)
        assert tensor.tolist() == ([3.0] if rank == ROOT else [rank + 1.0])
        tensor = torch.tensor([rank])
        assert bagua.broadcast_inplace(tensor, 2).tolist() == [2]
        rows = torch.full((3, 2), -1)
        rows[rank] = rank
        assert bagua.allgather_inplace(rows)[:, 0].tolist() == [0, 1, 2]
        rows = torch.full((3, 2), -1)
        rows[rank] = rank
        gathered = bagua.gather_inplace(rows, ROOT)[:, 0].tolist()
        assert gathered == ([0, 1, 2] if rank == ROOT else [rank if r == rank else -1 for r in range(3)])
        rows = torch.arange(3.0) + rank
        assert bagua.reduce_scatter_inplace(rows) is rows
        assert rows.tolist() == [3.0 * r + 3 if r == rank else r + rank for r in range(3)]
        rows = torch.arange(3) + 10 * rank
        assert bagua.alltoall_inplace(rows).tolist() == [rank, 10 + rank, 20 + rank]
        rows, splits = bagua.alltoall_v_inplace(torch.full((3,), rank), [1, 1, 1])
        assert (rows.tolist(), splits) == ([0, 1, 2], [1, 1, 1])
        part = torch.zeros((), dtype=torch.int64)
        bagua.scatter_inplace(part, torch.arange(3) if rank == 0 else None)
        assert int(part) == rank

    run(job, acting(act))


def test_not_in_place_leaves_the_arguments_and_takes_any_layout() -> None:
    job = Job(2)

    def act(worker: Worker) -> None:
        tensor = torch.arange(6.0).view(2, 3).t().requires_grad_()
        before = tensor.detach().clone()
        for result in (bagua.allreduce(tensor), bagua.broadcast(tensor), bagua.allgather(tensor)):
            assert not result.requires_grad
        square = torch.arange(4.0).view(2, 2).t()
        assert bagua.alltoall(square).shape == bagua.reduce_scatter(square).expand(2, 2).shape
        assert torch.equal(tensor.detach(), before)
        assert torch.equal(bagua.allreduce(tensor), before * 2)

    run(job, acting(act))


def test_messages_between_two() -> None:
    job = Job(3)

    def act(worker: Worker) -> Any:
        rank = rank_of(worker)
        if rank == 0:
            bagua.send(torch.tensor([1.0]), 2, tag=5)
            bagua.send(torch.tensor([2.0]), 2, tag=6)
            return None
        if rank == 2:
            first = torch.zeros(1)
            assert bagua.recv_inplace(first, 0, tag=5) is first
            second = bagua.recv(torch.zeros(1), 0, tag=6)
            return first.tolist() + second.tolist()
        return None

    assert run(job, acting(act))[2] == [1.0, 2.0]
    assert all(not w.state.operations.is_running and w.operations == [] for w in job.workers)


def test_objects_travel_as_plain_values() -> None:
    value = {
        "name": "x",
        3: [1.5, None, True, b"\x00"],
        "nested": OrderedDict(tensor=torch.arange(3, dtype=torch.bfloat16)),
        "array": numpy.arange(4.0),
        "tuple": (1, "b"),
    }
    job = Job(2)

    def act(worker: Worker) -> Any:
        return bagua.broadcast_object(value if rank_of(worker) == 0 else None)

    for got in run(job, acting(act)):
        assert got["name"] == "x" and got[3] == value[3] and got["tuple"] == (1, "b")
        assert torch.equal(got["nested"]["tensor"], value["nested"]["tensor"])  # type: ignore[index]
        assert numpy.array_equal(got["array"], value["array"])  # type: ignore[arg-type]


def test_what_cannot_travel_is_named() -> None:
    job = Job(1)

    def act(worker: Worker) -> None:
        with pytest.raises(StateCodecError, match=r"state\['model'\] is a torch.nn.modules.linear.Linear"):
            bagua.broadcast_object({"model": torch.nn.Linear(1, 1)})

    run(job, acting(act))


@pytest.mark.parametrize("name", list(CALLS))
def test_before_its_first_step_a_worker_is_alone(name: str) -> None:
    job = Job(2)
    newcomer = job.workers[1]
    newcomer.newcomers = frozenset({1})

    def act(worker: Worker) -> Any:
        call = CALLS[name]
        if name in ROOTED:
            with pytest.raises(ValueError, match="rank 1 is not among the 1"):
                call(0, 1)
            return None
        return plain(call(0, 1))

    result = acting(act)(newcomer)  # the other never comes
    assert name in ROOTED or result == expected(name, 0, 1)


def test_outside_steps_newcomers_are_left_out_and_ranks_are_without_them() -> None:
    job = Job(3)
    for worker in job.workers:
        worker.newcomers = frozenset({1})

    def act(worker: Worker) -> Any:
        if rank_of(worker) == 1:
            return bagua.allgather(torch.tensor(7)).tolist()
        gathered = bagua.gather(torch.tensor(rank_of(worker)), 1)
        return None if gathered is None else gathered.tolist()

    assert run(job, acting(act)) == [None, [7], [0, 2]]


def test_what_a_caller_gets_wrong_is_said_before_any_peer_is_asked() -> None:
    job = Job(2)

    def act(worker: Worker) -> None:
        one = torch.ones(1)
        for call, words in (
            (lambda: bagua.broadcast(one, 2), "rank 2 is not among the 2"),
            (lambda: bagua.reduce(one, -1), "rank -1"),
            (lambda: bagua.send(one, 0), "this worker itself"),
            (lambda: bagua.recv(one, 1, tag=-1), "a tag is"),
            (lambda: bagua.alltoall(one), r"\[2, ...\], not \(1,\)"),
            (lambda: bagua.reduce_scatter(one), r"\[2, ...\], not \(1,\)"),
            (lambda: bagua.alltoall_v(one, [2, 0]), r"\[2, 0\] rows"),
            (lambda: bagua.scatter(one), "must bring the parts"),
            (lambda: bagua.scatter(one, torch.ones(2, 3)), "cannot fill"),
            (lambda: bagua.allgather_inplace(one), "one row for each of the 2"),
            (lambda: bagua.new_group([0, 2]), r"\[0, 2\] in a world of 2"),
            (lambda: bagua.new_group([0, 0]), "different ranks"),
            (lambda: bagua.barrier(bagua.new_group([1])), "not in the group"),
        ):
            with pytest.raises(ValueError, match=words):
                call()
        with pytest.raises(TypeError, match="average of booleans"):
            bagua.allreduce(torch.tensor([True]), bagua.ReduceOp.AVG)

    acting(act)(job.workers[0])  # the other never comes


@pytest.mark.parametrize(
    "other", [lambda: bagua.broadcast(torch.ones(1), 0), lambda: bagua.allreduce(torch.ones(2))]
)
def test_workers_that_ask_for_different_ones_are_told(other: Callable[[], Any]) -> None:
    job = Job(2)

    def act(worker: Worker) -> None:
        with pytest.raises(bagua.MismatchedCollective, match=r"ranks \[\d\] ask for another"):
            bagua.allreduce(torch.ones(1)) if rank_of(worker) == 0 else other()

    run(job, acting(act))


# -- a loss in the middle, outside steps


def lost_in_the_middle(job: Job, lost: str, act: Callable[[Worker], Any]) -> list[Any]:
    """All but `lost` act; it dies once they wait for it."""
    survivors = [w for w in job.workers if w.worker_id != lost]

    def strike() -> None:
        first = survivors[0].communicator
        assert first is not None
        await_true(lambda: len(first._exchange.operations) == 1, "the survivors to wait")
        await_true(lambda: len(first._exchange.operations[0]) == len(survivors), "all of them")
        job.lose(lost)

    striking = threading.Thread(target=strike)
    striking.start()
    try:
        return run_ranks(survivors, acting(act))
    finally:
        striking.join(20.0)
        assert not striking.is_alive()


@pytest.mark.parametrize("name", [n for n in CALLS if n not in CUT])
def test_survivors_run_it_again_among_themselves(name: str) -> None:
    """w0 is lost: the root, rank 1 before, is rank 0 afterwards."""
    job = Job(3)

    def act(worker: Worker) -> Any:
        return plain(CALLS[name](rank_of(worker), 3))

    results = lost_in_the_middle(job, "w0", act)
    assert (
        results
        == {
            "allreduce": [[5.0], [5.0]],
            "reduce": [[5.0], None],
            "broadcast": [[1], [1]],
            "broadcast_object": [{"rank": 1}] * 2,
            "allgather": [[[1], [2]]] * 2,
            "gather": [[[1], [2]], None],
            "barrier": [None, None],
        }[name]
    )
    assert all(len(w.breaks) == 1 and w.operations == [0] for w in job.living)


@pytest.mark.parametrize("name", sorted(ROOTED))
def test_a_lost_root_is_named(name: str) -> None:
    job = Job(3)

    def act(worker: Worker) -> Any:
        with pytest.raises(bagua.PeerLostError, match=r"rank 1 is lost \(w1\)") as caught:
            CALLS[name](rank_of(worker), 3)
        assert caught.value.ranks == (1,)
        return bagua.allreduce(torch.ones(1)).tolist()  # and the job goes on

    assert lost_in_the_middle(job, "w1", act) == [[2.0]] * 2


@pytest.mark.parametrize("name", sorted(CUT))
def test_parts_of_a_lost_rank_have_no_receiver(name: str) -> None:
    job = Job(3)

    def act(worker: Worker) -> Any:
        with pytest.raises(bagua.PeerLostError, match=r"w2.*2 workers are left") as caught:
            CALLS[name](rank_of(worker), 3)
        assert caught.value.ranks == (2,)
        return plain(CALLS[name](rank_of(worker), 2))

    assert lost_in_the_middle(job, "w2", act) == [expected(name, r, 2) for r in range(2)]


def test_parts_are_not_given_to_ranks_that_were_renumbered() -> None:
    job = Job(3)
    job.reordered = lambda workers: list(reversed(workers))  # type: ignore[method-assign]

    def act(worker: Worker) -> Any:
        worker.fails_after = {1}  # the agreement is lost on all: no worker dies
        with pytest.raises(bagua.MembersChanged, match="cut for other ranks"):
            bagua.alltoall(torch.arange(3))
        return rank_of(worker)

    assert run(job, acting(act)) == [2, 1, 0]


@pytest.mark.parametrize("name", ["reduce", "gather", "reduce_scatter", "scatter", "alltoall", "alltoall_v"])
def test_who_misses_the_end_has_its_result_already(name: str) -> None:
    """All have their parts; w0 alone does not hear that all have, and then w2 is lost. w1 has returned, so w0 must
    return the same exchange, in which w2 took part."""
    job = Job(3)
    waits = 4 if name == "alltoall_v" else 3  # agreement, exchange (of sizes too), barrier
    job.workers[0].fails_after = {waits}
    outcome: list[Any] = [None] * 3

    def act(worker: Worker) -> None:
        rank = rank_of(worker)
        outcome[rank] = plain(CALLS[name](rank, 3))
        if rank == 2:
            job.lose("w2")
            return
        outcome[rank] = (outcome[rank], bagua.allreduce(torch.ones(1)).tolist())

    run(job, acting(act))
    assert outcome == [(expected(name, r, 3), [2.0]) for r in range(2)] + [expected(name, 2, 3)]
    assert len(job.workers[0].breaks) == 1


def test_a_common_result_comes_from_those_that_returned_it() -> None:
    job = Job(3)
    job.workers[0].fails_after = {3}  # agreement, size, and the bytes themselves
    outcome: list[Any] = [None] * 3

    def act(worker: Worker) -> None:
        rank = rank_of(worker)
        outcome[rank] = bagua.broadcast_object({"rank": rank}, 2)
        if rank == 2:
            job.lose("w2")
            return
        bagua.barrier()

    run(job, acting(act))
    assert outcome == [{"rank": 2}] * 3  # though w2 is gone when w0 gets it


def test_a_worker_that_was_away_is_told_that_there_is_no_part_for_it() -> None:
    job = Job(1)
    worker = job.workers[0]
    worker.state.operations.replace([torch.empty(0)], same_step=True)

    def act(worker: Worker) -> None:
        with pytest.raises(bagua.MembersChanged, match="was away"):
            bagua.gather(torch.ones(1))
        bagua.barrier()  # the next collective is the next for it too

    acting(act)(worker)
    assert worker.operations == [1]


def test_a_message_to_a_lost_worker() -> None:
    job = Job(3)
    receiver = job.workers[0]

    def act(worker: Worker) -> None:
        if rank_of(worker) == 1:
            bagua.barrier()
            return
        with pytest.raises(bagua.PeerLostError, match=r"receive from rank 2 .*rank 2 is lost \(w2\)"):
            bagua.recv(torch.zeros(1), 2)
        bagua.barrier()

    def strike() -> None:
        assert receiver.communicator is not None
        exchange = receiver.communicator._exchange
        await_true(lambda: bool(exchange.receives) and bool(exchange.operations), "both to wait")
        job.lose("w2")

    striking = threading.Thread(target=strike)
    striking.start()
    job_without_it = [job.workers[0], job.workers[1]]
    run_ranks(job_without_it, acting(act))
    striking.join(20.0)
    assert all(w.operations == [0] and not w.state.operations.is_running for w in job_without_it)


def test_a_message_that_a_third_workers_loss_interrupts() -> None:
    """It may have arrived or not, so both ends get an error, and it is not sent again automatically."""
    job = Job(3)
    receiver, sender = job.workers[0], job.workers[1]

    def act(worker: Worker) -> Any:
        if worker is sender:
            with pytest.raises(bagua.PeerLostError):
                bagua.recv(torch.zeros(1), 2)
            bagua.send(torch.tensor([4.0]), 0)
            return None
        with pytest.raises(bagua.MembersChanged, match="begin the exchange anew") as caught:
            bagua.recv(torch.zeros(1), 1)
        assert not isinstance(caught.value, bagua.PeerLostError)
        return bagua.recv(torch.zeros(1), 1).tolist()

    def strike() -> None:
        assert receiver.communicator is not None
        exchange = receiver.communicator._exchange
        await_true(lambda: len(exchange.receives) == 2, "both to wait")
        job.lose("w2")

    striking = threading.Thread(target=strike)
    striking.start()
    assert run_ranks([receiver, sender], acting(act)) == [[4.0], None]
    striking.join(20.0)


# -- in a step


@pytest.mark.parametrize("name", list(CALLS))
def test_in_a_step_a_loss_fails_the_step_and_ones_own_comes_back(name: str) -> None:
    job = Job(2)
    lonely = job.workers[0]
    lonely.in_step = True
    job.lose("w1")

    def act(worker: Worker) -> Any:
        return plain(CALLS[name](0, 2))

    own: Any = {
        "allreduce": [1.0],
        "reduce": None,
        "reduce_scatter": 0.0,
        "broadcast": [0],
        "broadcast_object": {"rank": 0},
        "allgather": [[0], [0]],
        "gather": None,
        "scatter": -1,
        "alltoall": [0, 1],
        "alltoall_v": ([], [0, 0]),
        "barrier": None,
    }[name]
    assert acting(act)(lonely) == own
    assert len(lonely.failed) == 1 and lonely.breaks == []
    assert acting(act)(lonely) == own  # the rest of the failed step does not communicate
    assert len(lonely.failed) == 1


def test_in_a_step_a_message_to_a_lost_worker_fails_the_step() -> None:
    job = Job(2)
    lonely = job.workers[0]
    lonely.in_step = True
    job.lose("w1")

    def act(worker: Worker) -> Any:
        bagua.send(torch.ones(1), 1)
        return bagua.recv(torch.full((1,), 5.0), 1).tolist()

    assert acting(act)(lonely) == [5.0] and len(lonely.failed) == 1


def test_behind_the_steps_reduction_a_loss_fails_the_step_too() -> None:
    """The step was final, and its boundary rolls it back."""
    job, engine = Job(2), Engine(None)
    lonely = job.workers[0]
    engine.next_step()
    assert engine.in_step and not engine.is_final
    engine.reduction_done(None)
    assert engine.is_final
    lonely.collectives._steps = engine
    job.lose("w1")
    assert acting(lambda w: bagua.allgather(torch.tensor(3)).tolist())(lonely) == [3, 3]
    assert engine.step_failed and engine.next_step() == 0


def test_in_a_step_of_a_broken_generation_a_collective_fails_the_step() -> None:
    """No rank may commit with a value of its own, while others have the one of the job."""
    job = Job(2)
    lonely = job.workers[0]
    lonely.in_step = lonely.broken = True
    assert acting(lambda w: bagua.allgather(torch.tensor(3)).tolist())(lonely) == [3, 3]
    assert len(lonely.failed) == 1


def test_who_copies_the_state_beside_the_step_says_nothing() -> None:
    job = Job(3)

    def act(worker: Worker) -> None:
        worker.in_step, worker.healing = True, frozenset({2})
        rank = rank_of(worker)
        own = torch.tensor([rank + 1.0])
        assert bagua.allreduce(own, bagua.ReduceOp.AVG).tolist() == [1.5]
        assert bagua.allreduce(own, bagua.ReduceOp.MIN).tolist() == [1.0]
        assert bagua.reduce_scatter(own.expand(3), bagua.ReduceOp.AVG).item() == 1.5
        mean = bagua.reduce(own, 0, bagua.ReduceOp.AVG)
        assert (mean is None) == (rank != 0) and (mean is None or mean.tolist() == [1.5])
        assert bagua.allgather(own).tolist() == [[1.0], [2.0], [0.0]]
        assert bagua.alltoall(own.expand(3)).tolist() == [1.0, 2.0, 0.0]
        assert bagua.broadcast(own, 0).tolist() == [1.0]
        for call in (
            lambda: bagua.broadcast(own, 2),
            lambda: bagua.broadcast_object(1, 2),
            lambda: bagua.scatter(own, own.expand(3, 1), 2),
        ):
            with pytest.raises(SourceHasNoState, match="rank 2 is in its first step"):
                call()

    run(job, acting(act))


# -- groups


@pytest.mark.parametrize("in_step", [False, True], ids=["outside", "in a step"])
def test_a_group_is_a_world_of_its_own(in_step: bool) -> None:
    job = Job(4)

    def act(worker: Worker) -> Any:
        worker.in_step = in_step
        rank = rank_of(worker)
        group = bagua.new_group([3, 1] if rank % 2 else [0, 2])
        assert (group.size, group.rank) == (2, rank // 2)
        total = bagua.allreduce(torch.tensor(float(rank)), group=group)
        sent = bagua.broadcast(torch.tensor(rank), 1, group)
        bagua.barrier(group)
        if group.rank == 0:
            bagua.send(torch.tensor(rank), 1, group=group)
        else:
            sent += bagua.recv(torch.tensor(0), 0, group=group)
        rows = torch.tensor([rank, rank])
        bagua.allgather_inplace(rows, group)
        return float(total), int(sent), rows.tolist()

    assert run(job, acting(act)) == [
        (2.0, 2, [0, 2]),
        (4.0, 3, [1, 3]),
        (2.0, 2, [0, 2]),
        (4.0, 4, [1, 3]),
    ]
    assert job.connections("outside/group-") == 2
    assert all(w.operations == [] for w in job.workers)


def test_all_workers_of_a_group_drain_their_devices_before_any_builds_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job, notes = Job(2), list[str]()
    start = Worker.start
    monkeypatch.setattr(Worker, "drain", lambda worker: notes.append("drain"))
    monkeypatch.setattr(Worker, "start", lambda *what: [notes.append("build"), start(*what)][1])
    run(job, acting(lambda worker: bagua.barrier(bagua.new_group([0, 1]))))
    assert notes == ["drain", "drain", "build", "build"]


def test_a_group_goes_on_in_the_next_generation_with_other_ranks() -> None:
    job = Job(3)
    groups: dict[str, bagua.Group] = {}

    def make(worker: Worker) -> Any:
        if rank_of(worker) == 0:
            return None
        groups[worker.worker_id] = bagua.new_group([1, 2])
        return bagua.allgather(torch.tensor(rank_of(worker)), groups[worker.worker_id]).tolist()

    assert run(job, acting(make)) == [None, [1, 2], [1, 2]]
    job.lose("w0")

    def use(worker: Worker) -> Any:
        bagua.barrier()  # the survivors enter the next generation
        return bagua.allgather(torch.tensor(rank_of(worker)), groups[worker.worker_id]).tolist()

    assert run(job, acting(use)) == [[0, 1], [0, 1]]
    assert job.connections("outside/group-") == 2


@pytest.mark.parametrize("in_step", [False, True], ids=["outside", "in a step"])
def test_a_group_that_lost_a_worker_is_refused(in_step: bool) -> None:
    job = Job(3)
    groups = {w.worker_id: acting(lambda _: bagua.new_group([0, 2]))(w) for w in job.workers}
    job.lose("w2")

    def act(worker: Worker) -> None:
        bagua.barrier()
        worker.in_step = in_step
        if worker.worker_id == "w0":
            with pytest.raises(bagua.PeerLostError, match=r"rank 1 is lost \(w2\).*a new group"):
                bagua.allreduce(torch.ones(1), group=groups["w0"])
        else:
            with pytest.raises(ValueError, match="not in the group"):
                bagua.allreduce(torch.ones(1), group=groups["w1"])

    run(job, acting(act))


def test_a_groups_collective_outside_steps_is_not_run_again() -> None:
    job = Job(3)

    def act(worker: Worker) -> Any:
        if rank_of(worker) == 2:
            return None
        group = bagua.new_group([0, 1])
        if rank_of(worker) == 0:
            with pytest.raises(bagua.MembersChanged, match="begin the exchange anew"):
                bagua.allreduce(torch.ones(1), group=group)
        else:
            with pytest.raises(bagua.PeerLostError, match="rank 2"):
                bagua.recv(torch.ones(1), 2)
        return bagua.allreduce(torch.ones(1), group=group).tolist()

    def strike() -> None:
        assert job.workers[0].communicator is not None
        exchange = job.workers[0].communicator._exchange
        # one waits for a message, the other to meet the group
        await_true(lambda: len(exchange.receives) == 2, "both to wait")
        job.lose("w2")

    striking = threading.Thread(target=strike)
    striking.start()
    assert run_ranks(job.workers[:2], acting(act)) == [[2.0], [2.0]]
    striking.join(20.0)


def test_a_group_of_one_does_not_communicate() -> None:
    job = Job(2)

    def act(worker: Worker) -> Any:
        group = bagua.new_group([0])
        assert bagua.broadcast_object("x", 0, group) == "x"
        return bagua.allgather(torch.tensor(4), group).tolist()

    assert acting(act)(job.workers[0]) == [4]
    assert job.connections("outside/group-") == 0


# -- without a job


@pytest.mark.parametrize("name", list(CALLS))
def test_under_plain_python_the_world_is_one(name: str, engine_of_thread: threading.local) -> None:
    engine_of_thread.engine = SimpleNamespace(collectives=None, place_of_script=lambda: (0, 1))
    if name in ROOTED:
        with pytest.raises(ValueError, match="rank 1 is not among the 1"):
            CALLS[name](0, 1)
    else:
        assert plain(CALLS[name](0, 1)) == expected(name, 0, 1)


def test_roots_and_groups_under_plain_python(engine_of_thread: threading.local) -> None:
    engine_of_thread.engine = SimpleNamespace(collectives=None, place_of_script=lambda: (0, 1))
    group = bagua.new_group()
    assert (group.size, group.rank, group.ranks) == (1, 0, (0,))
    for chosen in (None, group):
        gathered = bagua.gather(torch.tensor(2), 0, chosen)
        assert gathered is not None and gathered.tolist() == [2]
        assert bagua.scatter(torch.tensor(0), torch.tensor([5]), 0, chosen).item() == 5
        assert bagua.broadcast_object("y", 0, chosen) == "y"
        reduced = bagua.reduce(torch.tensor(3.0), 0, bagua.ReduceOp.AVG, chosen)
        assert reduced is not None and float(reduced) == 3.0
