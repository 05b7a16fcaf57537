"""torch's collectives in the replica group: among equal shards, for all shards at once, by the rules of all workers."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import bagua_core as bagua
from bagua_core.across_replicas import ReplicaGroup
from bagua_core.collectives import ask
from bagua_core.elastic.script_collectives.outside_collectives import SourceHasNoState
from bagua_core.elastic.script_collectives.requests import AllgatherRows
from tests.core.collectives.calls import acting, rank_of
from tests.core.communication.worlds import await_true, run_ranks
from tests.core.elastic.worlds_of_workers import Job, Worker, run

pytestmark = pytest.mark.filterwarnings("ignore:.*private function:FutureWarning")
SHARDS = 2
GROUP = ReplicaGroup()  # every thread is another worker


def shard_of(worker: Worker) -> int:
    assert worker.replica is not None
    return worker.replica.shard_rank


def own(worker: Worker) -> torch.Tensor:
    """Shows which worker it is of. Shards are uneven."""
    return torch.full((2 + shard_of(worker),), rank_of(worker) + 1.0)


def all_reduce(worker: Worker) -> list[float]:
    tensor = own(worker)
    dist.all_reduce(tensor, group=GROUP)
    return tensor.tolist()


def all_gather(worker: Worker) -> list[list[float]]:
    rows = [torch.zeros(2 + shard_of(worker)) for _ in range(GROUP.size())]
    dist.all_gather(rows, own(worker), group=GROUP)
    return [row.tolist() for row in rows]


def all_gather_single(worker: Worker) -> list[list[float]]:
    rows = torch.zeros(GROUP.size() * (2 + shard_of(worker)))
    # the name that every torch has
    dist._all_gather_base(rows, own(worker), group=GROUP)
    return rows.view(GROUP.size(), -1).tolist()


def broadcast(worker: Worker) -> list[float]:
    tensor = own(worker)
    dist.broadcast(tensor, group_src=1, group=GROUP)
    return tensor.tolist()


def reduce_scatter(worker: Worker) -> list[float]:
    output = torch.zeros(2 + shard_of(worker))
    dist.reduce_scatter(output, [own(worker) * (1 + r) for r in range(GROUP.size())], group=GROUP)
    return output.tolist()


def reduce_scatter_single(worker: Worker) -> list[float]:
    output = torch.zeros(2 + shard_of(worker))
    rows = torch.stack([own(worker) * (1 + r) for r in range(GROUP.size())])
    dist._reduce_scatter_base(output, rows.view(-1), group=GROUP)
    return output.tolist()


def barrier(worker: Worker) -> None:
    dist.barrier(group=GROUP)


CALLS: dict[str, Callable[[Worker], Any]] = {
    call.__name__: call
    for call in (
        all_reduce,
        all_gather,
        all_gather_single,
        broadcast,
        reduce_scatter,
        reduce_scatter_single,
        barrier,
    )
}


def expected(name: str, rank: int, replicas: int) -> Any:
    replica, shard = divmod(rank, SHARDS)
    length, values = 2 + shard, [r * SHARDS + shard + 1.0 for r in range(replicas)]
    return {
        "all_reduce": [sum(values)] * length,
        "all_gather": [[v] * length for v in values],
        "broadcast": [values[1]] * length,
        "reduce_scatter": [sum(values) * (1 + replica)] * length,
        "barrier": None,
    }[name.removesuffix("_single")]


@pytest.mark.parametrize("in_step", [False, True], ids=["outside", "in a step"])
@pytest.mark.parametrize("name", list(CALLS))
def test_the_workers_with_each_shard_get_their_result(name: str, in_step: bool) -> None:
    job = Job(3 * SHARDS, SHARDS)

    def act(worker: Worker) -> Any:
        worker.in_step = in_step
        assert (GROUP.rank(), GROUP.size()) == (rank_of(worker) // SHARDS, 3)
        return CALLS[name](worker)

    assert run(job, acting(act)) == [expected(name, r, 3) for r in range(3 * SHARDS)]
    assert all(w.operations == ([] if in_step else [0]) for w in job.workers)


@pytest.mark.parametrize("in_step", [False, True], ids=["outside", "in a step"])
def test_rows_of_the_workers_with_each_shard_may_differ_in_number(in_step: bool) -> None:
    job = Job(3 * SHARDS, SHARDS)

    def act(worker: Worker) -> Any:
        worker.in_step = in_step
        rank = rank_of(worker)
        rows = torch.full((rank // SHARDS, 1 + shard_of(worker)), rank)
        return ask(AllgatherRows(rows, across_replicas=True))[0].tolist()

    results = run(job, acting(act))
    assert results == [[[2], [4], [4]], [[3, 3], [5, 5], [5, 5]]] * 3


def test_waits_of_uneven_shards_have_one_name() -> None:
    """Or a worker that comes late would be taken for one that disagrees."""
    job = Job(2 * SHARDS, SHARDS)
    for worker in job.workers:
        worker.trail.at(5)
    run(job, acting(all_reduce))
    waits = [worker.trail.waits_in() for worker in job.workers]
    assert {next(o.name for o in wait.operations) for wait in waits if wait} == {
        "in allreduce across replicas"
    }
    assert {len(wait.operations) for wait in waits if wait} == {1}


@pytest.mark.parametrize("in_step", [False, True], ids=["outside", "in a step"])
@pytest.mark.parametrize("replicas", [1, 2])
def test_shards_that_call_another_collective_are_found(replicas: int, in_step: bool) -> None:
    """Among equal shards alone they would agree, and wait for their mates' outcome without end."""
    job = Job(replicas * SHARDS, SHARDS)

    def act(worker: Worker) -> None:
        worker.in_step = in_step
        with pytest.raises(bagua.MismatchedCollective):
            if shard_of(worker):
                bagua.allreduce(own(worker))
            else:
                all_reduce(worker)

    run(job, acting(act))


def test_shapes_that_differ_among_equal_shards_are_found() -> None:
    job = Job(2 * SHARDS, SHARDS)

    def act(worker: Worker) -> None:
        tensor = torch.ones(2 + rank_of(worker))
        with pytest.raises(bagua.MismatchedCollective, match="allreduce across replicas, sum of"):
            dist.all_reduce(tensor, group=GROUP)

    run(job, acting(act))


# -- losses


def lost_in_the_middle(job: Job, act: Callable[[Worker], Any]) -> list[Any]:
    """All but the workers w2 and w3, which are replica 1, act; that is lost once they wait for it."""
    survivors = [w for w in job.workers if w.worker_id not in ("w2", "w3")]

    def strike() -> None:
        first = survivors[0].communicator
        assert first is not None
        waits = first._exchange.operations
        await_true(lambda: any(len(o) == len(survivors) for o in list(waits.values())), "survivors to wait")
        job.lose("w3")

    striking = threading.Thread(target=strike)
    striking.start()
    try:
        return run_ranks(survivors, acting(act))
    finally:
        striking.join(20.0)
        assert not striking.is_alive()


def test_survivors_run_it_again_among_the_replicas_that_are_left() -> None:
    job = Job(3 * SHARDS, SHARDS)
    assert lost_in_the_middle(job, all_reduce) == [[1.0 + 5.0] * 2, [2.0 + 6.0] * 3] * 2
    assert all(len(w.breaks) == 1 and w.operations == [0] for w in job.living)


def test_the_last_replica_goes_on_alone() -> None:
    job = Job(2 * SHARDS, SHARDS)
    assert lost_in_the_middle(job, all_reduce) == [[1.0] * 2, [2.0] * 3]


@pytest.mark.parametrize("name", ["broadcast", "reduce_scatter", "reduce_scatter_single"])
def test_what_needs_the_lost_replica_says_so_on_every_shard(name: str) -> None:
    job = Job(3 * SHARDS, SHARDS)

    def act(worker: Worker) -> Any:
        with pytest.raises(bagua.PeerLostError, match=f"rank 1 is lost .w{2 + shard_of(worker)}.*2 workers"):
            CALLS[name](worker)
        return all_reduce(worker)  # and the job goes on

    assert lost_in_the_middle(job, act) == [[1.0 + 3.0] * 2, [2.0 + 4.0] * 3] * 2


def test_fewer_rows_than_tensors_for_them_are_an_error() -> None:
    job = Job(3 * SHARDS, SHARDS)

    def act(worker: Worker) -> Any:
        with pytest.raises(bagua.MembersChanged, match="2 replicas instead of 3"):
            all_gather(worker)
        return all_gather(worker)

    assert lost_in_the_middle(job, act) == [expected("all_gather", r, 2) for r in range(2 * SHARDS)]


@pytest.mark.parametrize("name", ["all_reduce", "reduce_scatter"])
def test_one_shard_that_misses_the_end_gets_what_the_others_returned(name: str) -> None:
    """w0 alone does not hear of the end, so its mate gives its result up too. Then replica 2 is lost, after it has
    returned: both return the exchange in which it took part."""
    job = Job(3 * SHARDS, SHARDS)
    # of all workers, of equal shards, the exchange, and the barrier behind results that differ
    job.workers[0].fails_after = {3 if name == "all_reduce" else 4}
    done, lost = threading.Barrier(SHARDS), threading.Event()
    outcome: list[Any] = [None] * (3 * SHARDS)

    def act(worker: Worker) -> None:
        rank = rank_of(worker)
        outcome[rank] = CALLS[name](worker)
        if rank >= 2 * SHARDS:
            if done.wait() == 0:
                job.lose("w4")
                lost.set()
            return
        dist.barrier(group=GROUP)

    run(job, acting(act))
    assert lost.is_set()
    assert outcome == [expected(name, r, 3) for r in range(3 * SHARDS)]
    assert [len(w.breaks) for w in job.workers[:SHARDS]] == [1, 1]


# -- joiners


def test_outside_steps_a_replica_that_joins_is_left_out() -> None:
    job = Job(3 * SHARDS, SHARDS)
    for worker in job.workers:
        worker.newcomers = frozenset({1})

    def act(worker: Worker) -> Any:
        place = GROUP.rank(), GROUP.size()
        return place, all_reduce(worker)

    found = run(job, acting(act))
    assert [place for place, _ in found] == [(0, 2)] * 2 + [(2, 3)] * 2 + [(1, 2)] * 2
    assert [sums[0] for _, sums in found] == [6.0, 8.0, 3.0, 4.0, 6.0, 8.0]


def test_in_its_first_step_a_replica_counts_with_what_changes_nothing() -> None:
    job = Job(3 * SHARDS, SHARDS)

    def act(worker: Worker) -> list[float]:
        worker.in_step, worker.healing = True, frozenset({1})
        worker.fails_after = set()
        tensor = own(worker)
        dist.all_reduce(tensor, op=dist.ReduceOp.AVG, group=GROUP)
        with pytest.raises(SourceHasNoState):
            broadcast(worker)
        return tensor.tolist()

    assert run(job, acting(act)) == [[3.0] * 2, [4.0] * 3] * 3


# -- what is refused


def test_what_does_not_fit_is_refused_before_any_peer_is_asked() -> None:
    job = Job(2 * SHARDS, SHARDS)
    lonely = job.workers[0]
    part = torch.ones(2)

    def act(worker: Worker) -> None:
        for call in (
            lambda: dist.all_gather([part], part, group=GROUP),
            lambda: dist._all_gather_base(torch.zeros(2), part, group=GROUP),
            lambda: dist.reduce_scatter(part, [part] * 3, group=GROUP),
            lambda: dist._reduce_scatter_base(part, torch.zeros(3), group=GROUP),
        ):
            with pytest.raises(ValueError, match="one part for each of the 2 replicas"):
                call()
        with pytest.raises(ValueError, match="rank 2 is not among the 2"):
            dist.broadcast(part, group_src=2, group=GROUP)

    acting(act)(lonely)
    assert lonely.waits == 0


def test_a_failed_step_gives_back_ones_own() -> None:
    job = Job(2 * SHARDS, SHARDS)
    job.lose("w2")

    def act(worker: Worker) -> Any:
        worker.in_step = True
        return all_reduce(worker), all_reduce(worker)

    assert run(job, acting(act)) == [([1.0] * 2,) * 2, ([2.0] * 3,) * 2]
    assert all(len(w.failed) == 1 for w in job.living)
