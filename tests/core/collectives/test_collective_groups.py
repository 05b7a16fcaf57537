"""Collectives of a group of workers, and those of a process that is alone."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import bagua_core as bagua
from tests.core.collectives.calls import CALLS, ROOTED, acting, expected, plain, rank_of
from tests.core.communication.worlds import await_true, run_ranks
from tests.core.elastic.worlds_of_workers import Job, Worker, run

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


def alone() -> Any:
    """The engine of a process without a launcher."""
    return SimpleNamespace(collectives=None, place_of_script=lambda: (0, 1), has_fillers=False)


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
    engine_of_thread.engine = alone()
    if name in ROOTED:
        with pytest.raises(ValueError, match="rank 1 is not among the 1"):
            CALLS[name](0, 1)
    else:
        assert plain(CALLS[name](0, 1)) == expected(name, 0, 1)


def test_roots_and_groups_under_plain_python(engine_of_thread: threading.local) -> None:
    engine_of_thread.engine = alone()
    group = bagua.new_group()
    assert (group.size, group.rank, group.ranks) == (1, 0, (0,))
    for chosen in (None, group):
        gathered = bagua.gather(torch.tensor(2), 0, chosen)
        assert gathered is not None and gathered.tolist() == [2]
        assert bagua.scatter(torch.tensor(0), torch.tensor([5]), 0, chosen).item() == 5
        assert bagua.broadcast_object("y", 0, chosen) == "y"
        reduced = bagua.reduce(torch.tensor(3.0), 0, bagua.ReduceOp.AVG, chosen)
        assert reduced is not None and float(reduced) == 3.0
