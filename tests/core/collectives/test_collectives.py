"""The public collectives outside steps, by workers in threads: what each gives, and what is refused."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch

import bagua_core as bagua
from bagua_core.elastic.state.state_codec import StateCodecError
from tests.core.collectives.calls import CALLS, ROOT, acting, expected, plain, rank_of
from tests.core.elastic.worlds_of_workers import Job, Worker, run

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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.int64, torch.complex64])
@pytest.mark.parametrize("counts", [[2, 0, 1], [0, 0, 0], [1, 1, 1]], ids=str)
def test_rows_are_concatenated_by_rank(counts: list[int], dtype: torch.dtype) -> None:
    job = Job(3)

    def act(worker: Worker) -> torch.Tensor:
        rank = rank_of(worker)
        tensor = torch.full((5, counts[rank], 2), rank, dtype=dtype).transpose(0, 1)  # not contiguous
        before = tensor.clone()
        result = bagua.allgather_rows(tensor.requires_grad_(tensor.is_floating_point()))
        assert torch.equal(tensor, before) and not result.requires_grad and result.is_contiguous()
        return result

    rows = [torch.full((n, 5, 2), r, dtype=dtype) for r, n in enumerate(counts)]
    assert all(torch.equal(result, torch.cat(rows)) for result in run(job, acting(act)))


def test_rows_without_elements_keep_their_number() -> None:
    job = Job(2)
    results = run(job, acting(lambda w: bagua.allgather_rows(torch.zeros(1 + rank_of(w), 0))))
    assert [tuple(result.shape) for result in results] == [(3, 0)] * 2


def test_a_worker_with_fillers_brings_no_rows() -> None:
    job = Job(3)

    def act(worker: Worker) -> Any:
        rank = rank_of(worker)
        worker.in_step, worker.has_fillers = True, rank == 1
        group = bagua.new_group([1, 2])
        own = torch.tensor([10 * rank, 10 * rank + 1][: 1 + rank % 2])
        among = [] if rank == 0 else acting(lambda _: bagua.allgather_rows(own, group).tolist())(worker)
        return acting(lambda _: bagua.allgather_rows(own).tolist())(worker), among

    results = run(job, acting(act))
    assert [rows for rows, _ in results] == [[0, 20]] * 3
    assert [rows for _, rows in results[1:]] == [[20]] * 2


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
        with pytest.raises(StateCodecError, match=r"value\['model'\] is a torch.nn.modules.linear.Linear"):
            bagua.broadcast_object({"model": torch.nn.Linear(1, 1)})

    run(job, acting(act))


SUBSTITUTES_OF_RANK_2_OF_3: dict[str, Any] = {
    "allreduce": [3.0],
    "reduce": None,
    "reduce_scatter": 4.0,
    "broadcast": [2],
    "broadcast_object": {"rank": 2},
    "allgather": [[2]] * 3,
    "allgather_rows": [[2, 2]] * 6,
    "gather": None,
    "scatter": -1,
    "alltoall": [20, 21, 22],
    "alltoall_v": ([2] * 6, [2, 2, 2]),
    "barrier": None,
}


@pytest.mark.parametrize("name", list(CALLS))
def test_before_its_first_step_a_joiner_has_no_peers_and_is_no_root(name: str) -> None:
    """Its rank is behind the job's workers, so it does nothing that is done once."""
    job = Job(3)
    newcomer = job.workers[0]  # whatever rank it has in its first step
    newcomer.newcomers = frozenset({0})

    def act(worker: Worker) -> Any:
        assert worker.place_of_script() == (2, 3)
        return plain(CALLS[name](2, 3))

    result = acting(act)(newcomer)  # the others never come
    assert result == SUBSTITUTES_OF_RANK_2_OF_3[name]


def test_outside_steps_newcomers_are_left_out_and_ranks_are_without_them() -> None:
    job = Job(3)
    for worker in job.workers:
        worker.newcomers = frozenset({1})

    def act(worker: Worker) -> Any:
        if rank_of(worker) == 1:
            group = bagua.new_group([0, 2])
            assert (group.rank, group.size) == (1, 2)
            assert bagua.allgather(torch.tensor(7), group=group).tolist() == [7, 7]
            assert bagua.gather(torch.tensor(7), 0) is None
            others, place = bagua.new_group([0, 1]), worker.replica_place()
            worker.in_step = True  # in its steps too the groups that it made before have no peers
            assert bagua.allgather(torch.tensor(7), group=group).tolist() == [7, 7]
            with pytest.raises(ValueError, match="not in the group"):
                bagua.barrier(others)
            return place
        gathered = bagua.gather(torch.tensor(rank_of(worker)), 1)
        return None if gathered is None else gathered.tolist()

    assert run(job, acting(act)) == [None, (2, 3), [0, 2]]


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
            (lambda: bagua.allgather_rows(torch.tensor(1.0)), r"\[rows, ...\], not \(\)"),
            (lambda: bagua.scatter(one, torch.ones(2, 3)), "cannot fill"),
            (lambda: bagua.allgather_inplace(one), "one row for each of the 2"),
            (lambda: bagua.new_group([0, 2]), r"\[0, 2\] in a world of 2"),
            (lambda: bagua.new_group([0, 0]), "different ranks"),
            (lambda: bagua.barrier(bagua.new_group([1])), "not in the group"),
        ):
            with pytest.raises(ValueError, match=words):
                call()
        for call, words in (
            (lambda: bagua.allreduce(torch.tensor([True]), bagua.ReduceOp.AVG), "average of booleans"),
            (lambda: bagua.allreduce(1.0), "allreduce takes a tensor, not float; broadcast_object"),
            (lambda: bagua.broadcast([1], 0), "broadcast takes a tensor, not list"),
            (lambda: bagua.allreduce(one, "sum"), "op='sum' is no bagua_core.ReduceOp"),
            (lambda: bagua.reduce(one, 0, torch.distributed.ReduceOp.MAX), "no bagua_core.ReduceOp"),
            (lambda: bagua.broadcast_object({"a": {1}}), r"value\['a'\] is a builtins.set.*can$"),
        ):
            with pytest.raises(TypeError, match=words):
                call()

    acting(act)(job.workers[0])  # the other never comes


@pytest.mark.parametrize("in_step", [False, True], ids=["outside", "in a step"])
@pytest.mark.parametrize(
    ("other", "words"),
    [
        (lambda: bagua.broadcast(torch.ones(1), 0), r"ranks \[\d\] ask for another"),
        (lambda: bagua.allreduce(torch.ones(1), bagua.ReduceOp.MAX), r"ranks \[\d\] ask for another"),
        (lambda: bagua.allreduce(torch.ones(2)), r"ranks \[\d\] ask for it with another shape"),
    ],
    ids=["collective", "operation", "shape"],
)
def test_workers_that_ask_for_different_ones_are_told(
    other: Callable[[], Any], words: str, in_step: bool
) -> None:
    job = Job(2)

    def act(worker: Worker) -> None:
        worker.in_step = in_step
        with pytest.raises(bagua.MismatchedCollective, match=words):
            bagua.allreduce(torch.ones(1)) if rank_of(worker) == 0 else other()

    run(job, acting(act))


def test_shapes_that_differ_in_a_group_are_named() -> None:
    job = Job(3)

    def act(worker: Worker) -> None:
        rank = rank_of(worker)
        if rank:
            with pytest.raises(bagua.MismatchedCollective, match=rf"ranks \[{2 - rank}\] ask for it with"):
                bagua.allgather(torch.ones(rank), bagua.new_group([1, 2]))

    run(job, acting(act))
