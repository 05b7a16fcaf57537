"""What a loss of a worker in the middle makes of a collective, outside steps and in one."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

import bagua_core as bagua
from bagua_core.communication.communicator import CollectiveFailed
from bagua_core.elastic.script_collectives.outside_collectives import SourceHasNoState
from bagua_core.elastic.step.engine import Engine
from bagua_core.elastic.waiting.operations import MismatchedCollective
from tests.core.collectives.calls import CALLS, CUT, ROOTED, acting, expected, plain, rank_of
from tests.core.communication.worlds import await_true, run_ranks
from tests.core.elastic.worlds_of_workers import Job, Worker, run

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
            "allgather_rows": [[[1, 1], [2, 2], [2, 2]]] * 2,
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


def test_rows_come_from_those_that_returned_them_whatever_their_number() -> None:
    job = Job(3)
    job.workers[0].fails_after = {3}  # agreement, numbers of rows, and the rows
    outcome: list[Any] = [None] * 3

    def act(worker: Worker) -> None:
        rank = rank_of(worker)
        outcome[rank] = bagua.allgather_rows(torch.full((2 * rank,), rank)).tolist()
        if rank == 2:
            job.lose("w2")
            return
        bagua.barrier()

    run(job, acting(act))
    assert outcome == [[1, 1, 2, 2, 2, 2]] * 3


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


def test_a_worker_that_the_job_goes_on_without_is_warned_and_is_not_rank_0(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It has no part in the job's results until it joins anew, so it must do nothing that is done once."""
    job = Job(3)
    cut_off = job.workers[0]

    def act(worker: Worker) -> Any:
        own = torch.tensor([rank_of(worker) + 1.0])
        if worker is cut_off:
            job.lose("w0")
            worker.break_generation(CollectiveFailed("its peers closed their connections"))
        total = bagua.allreduce(own).tolist()
        rank, size = worker.replica_place()
        if worker is cut_off:
            rows = bagua.allgather(torch.tensor([7]))
            assert rows[rank].tolist() == [7] and len(rows) == size
            assert bagua.broadcast_object("own", 0) == "own"
            group = bagua.new_group([0, rank])
            assert (group.rank, group.size) == (1, 2)
            assert bagua.allgather(torch.tensor([7]), group=group).tolist() == [[7], [7]]
        return total, (rank, size)

    assert run(job, acting(act)) == [([1.0], (2, 3)), ([5.0], (0, 2)), ([5.0], (1, 2))]
    assert capsys.readouterr().err.count("the job went on without this worker") == 1


@pytest.mark.parametrize("call", [bagua.gather, bagua.reduce])
def test_a_root_that_the_job_goes_on_without_has_no_result(call: Callable[..., torch.Tensor | None]) -> None:
    """As no other rank has one: the others raise, and what the root would have is made of its own input alone."""
    job = Job(3)

    def act(worker: Worker) -> torch.Tensor | None:
        if rank_of(worker) > 0:
            with pytest.raises(bagua.PeerLostError):
                call(torch.ones(1), 0)
            return None
        job.lose("w0")
        worker.break_generation(CollectiveFailed("its peers closed their connections"))
        return call(torch.ones(1), 0)

    assert run(job, acting(act)) == [None] * 3


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
        "allgather_rows": [],
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


def test_rows_of_fillers_come_back_where_the_step_failed() -> None:
    """The rest of the loop body can work with them."""
    job = Job(2)
    lonely = job.workers[0]
    lonely.in_step = lonely.has_fillers = True
    job.lose("w1")
    result = acting(lambda w: bagua.allgather_rows(torch.tensor([[1, 2], [3, 4]])).tolist())(lonely)
    assert result == [[1, 2], [3, 4]] * 2


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
        assert bagua.allgather_rows(own).tolist() == [1.0, 2.0]
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


def test_who_copies_the_state_beside_the_step_computes_fillers_of_any_shape() -> None:
    job = Job(3)

    def act(worker: Worker) -> None:
        worker.in_step, worker.healing = True, frozenset({2})
        rank = rank_of(worker)
        heals = rank == 2
        rows = torch.full((1, 2) if heals else (4, 2), rank + 1.0)
        gathered = bagua.allgather(rows)
        assert gathered.shape == (3, *rows.shape)
        assert heals or [rows_of.unique().tolist() for rows_of in gathered] == [[1.0], [2.0], [0.0]]
        mean = bagua.allreduce(rows, bagua.ReduceOp.AVG)
        assert mean.shape == rows.shape and (heals or mean.unique().tolist() == [1.5])
        with pytest.raises(MismatchedCollective):
            bagua.allreduce(torch.zeros(1 if rank == 1 else 2))

    run(job, acting(act))


def test_a_joiner_that_asks_for_another_collective_is_found() -> None:
    job = Job(3)

    def act(worker: Worker) -> None:
        worker.in_step, worker.healing = True, frozenset({2})
        with pytest.raises(MismatchedCollective):
            bagua.barrier() if rank_of(worker) == 2 else bagua.allreduce(torch.zeros(2))

    run(job, acting(act))
