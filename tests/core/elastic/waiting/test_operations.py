"""Collectives outside steps: results are kept until the next step, and workers that disagree get an error."""

from __future__ import annotations

import itertools

import pytest
import torch

from bagua_core.communication.communicator import CollectiveFailed, Pending, ReduceOp
from bagua_core.communication.reducible import BITWISE
from bagua_core.elastic.script_collectives.requests import (
    Allgather,
    AllgatherRows,
    Allreduce,
    Alltoall,
    AlltoallV,
    Broadcast,
    BroadcastBytes,
    Gather,
    Reduce,
    ReduceScatter,
    Request,
    Scatter,
)
from bagua_core.elastic.waiting.operations import MismatchedCollective, OperationLog, check_agreement, neutral
from tests.core.communication.in_process import InProcessCommunicator, build_in_process
from tests.core.communication.worlds import run_ranks


def wait(pending: Pending) -> None:
    pending.wait()


# -- the log


def test_a_result_that_others_have_is_given_out_without_a_collective() -> None:
    log = OperationLog()
    log.replace([torch.tensor([1.0]), torch.tensor([2.0])], same_step=True)  # healed: it missed both
    given = []
    while (result := log.recorded(log.next_index)) is not None:
        given.append(float(result))
        log.returned()
    assert given == [1.0, 2.0]
    assert log.next_index == 2


def test_a_rank_in_the_middle_keeps_its_place_when_it_is_healed() -> None:
    log = OperationLog()
    log.record(torch.tensor([1.0]))
    log.returned()
    log.replace([torch.tensor([1.0]), torch.tensor([2.0])], same_step=True)
    assert log.next_index == 1
    result = log.recorded(1)
    assert result is not None and float(result) == 2.0


def test_what_is_recorded_is_a_copy() -> None:
    log = OperationLog()
    result = torch.ones(2, requires_grad=True)
    log.record(result)
    with torch.no_grad():
        result.zero_()
    kept = log.recorded(0)
    assert kept is not None and kept.tolist() == [1.0, 1.0] and not kept.requires_grad


def test_a_commit_counts_anew_and_being_left_out_keeps_the_place() -> None:
    log = OperationLog()
    for value in (1.0, 2.0):
        log.record(torch.tensor([value]))
        log.returned()
    log.forget()
    assert (log.next_index, log.results()) == (2, [])
    log.clear()
    assert (log.next_index, log.results()) == (0, [])


# -- agreement


def disagreement(asked: list[tuple[int, str, str]]) -> list[str]:
    """Each rank's error; empty for those that agree."""

    def act(communicator: InProcessCommunicator) -> str:
        try:
            check_agreement(communicator, *asked[communicator.global_rank], wait)
        except MismatchedCollective as error:
            return str(error)
        return ""

    return run_ranks(build_in_process(len(asked)), act)


def asked(request: Request) -> tuple[str, str]:
    return request.operation(request.root), request.asked_of()


def test_equal_collectives_agree() -> None:
    requests = [asked(Allreduce(torch.ones(2, 3) * r, ReduceOp.AVG)) for r in range(3)]
    assert disagreement([(3, *words) for words in requests]) == ["", "", ""]


SAME = (1, *asked(Allreduce(torch.zeros(2, 3), ReduceOp.SUM)))


@pytest.mark.parametrize(
    "other",
    [
        (2, *asked(Allreduce(torch.zeros(2, 3), ReduceOp.SUM))),
        (1, *asked(Allreduce(torch.zeros(2, 3), ReduceOp.MAX))),
        (1, *asked(Reduce(torch.zeros(2, 3), ReduceOp.SUM, root=0))),
        (1, *asked(Broadcast(torch.zeros(2, 3), root=0))),
        (1, *asked(BroadcastBytes(None, root=0))),
        (1, *asked(Allgather(torch.zeros(2, 3)))),
        (1, *asked(Gather(torch.zeros(2, 3), root=0))),
        (1, *asked(Scatter(torch.zeros(2, 3), None, root=0))),
        (1, *asked(ReduceScatter(torch.zeros(2, 3), ReduceOp.SUM))),
        (1, *asked(Alltoall(torch.zeros(2, 3)))),
        (1, *asked(AllgatherRows(torch.zeros(2, 3)))),
        (1, *asked(AlltoallV(torch.zeros(2, 3), [1, 1]))),
    ],
    ids=["place", "operation", *"abcdefghij"],
)
def test_every_rank_is_told_of_a_mismatch(other: tuple[int, str, str]) -> None:
    told = disagreement([SAME, other, SAME])
    assert (
        "global rank 0 asks for collective 1 after the step: allreduce, sum of (2, 3) torch.float32, but "
        "ranks [1]" in told[0]
    )
    assert "ranks [0, 2] ask for another" in told[1]
    assert "ranks [1] ask for another" in told[2]
    assert all("same collectives in the same order" in text for text in told)


@pytest.mark.parametrize(
    "tensor",
    [torch.zeros(3, 3), torch.zeros(6), torch.zeros(2, 3, dtype=torch.float64)],
    ids=["share", "dimensions", "dtype"],
)
def test_other_shapes_of_the_same_collective_are_told_apart_from_another_order(tensor: torch.Tensor) -> None:
    told = disagreement([SAME, (1, *asked(Allreduce(tensor, ReduceOp.SUM))), SAME])
    assert told[0].startswith(
        "global rank 0 asks for collective 1 after the step: allreduce, sum of (2, 3) torch.float32, but ranks [1] "
        "ask for it with another shape or dtype. Shares"
    )
    assert "ranks [0, 2] ask for it" in told[1] and "ranks [1] ask for it" in told[2]
    assert all("allgather_rows()" in text and "drop_last=True" in text for text in told)
    assert not any("order" in text for text in told)


def test_rows_that_differ_in_number_are_the_same_and_rows_of_other_shapes_are_named() -> None:
    few, none, wide = (AllgatherRows(torch.zeros(*shape)) for shape in ((2, 3), (0, 3), (2, 4)))
    assert disagreement([(1, *asked(few)), (1, *asked(none))]) == ["", ""]
    told = disagreement([(1, *asked(few)), (1, *asked(wide))])
    assert "allgather_rows of rows of (3,) torch.float32, but ranks [1] ask for it" in told[0]


def test_another_collective_beside_other_shapes_comes_first() -> None:
    """It explains the rest."""
    told = disagreement([SAME, (1, *asked(Allreduce(torch.zeros(3, 3), ReduceOp.SUM))), (1, "barrier", "")])
    assert "ranks [2] ask for another" in told[0] and "ranks [2] ask for another" in told[1]
    assert "ranks [0, 1] ask for another" in told[2]


def test_another_root_is_another_collective() -> None:
    for make in (
        lambda root: Broadcast(torch.ones(2), root=root),
        lambda root: Gather(torch.ones(2), root=root),
        lambda root: Reduce(torch.ones(2), ReduceOp.SUM, root=root),
        lambda root: Scatter(torch.ones(2), None, root=root),
        lambda root: BroadcastBytes(None, root=root),
    ):
        assert asked(make(0)) != asked(make(1))


def test_a_lost_peer_is_no_mismatch() -> None:
    world = build_in_process(2)
    world[1].lose("10.0.0.2")
    with pytest.raises(CollectiveFailed):
        check_agreement(world[0], 0, "barrier", "", wait)


# -- neutral elements

FLOATING = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
WHOLE = [torch.int64, torch.int32, torch.uint8, torch.int16]


@pytest.mark.parametrize(
    ("op", "dtype"),
    [
        (op, dtype)
        for op, dtype in itertools.product(ReduceOp, FLOATING + WHOLE)
        if op is not ReduceOp.AVG and (op not in BITWISE or dtype in WHOLE)
    ],
)
def test_a_neutral_contribution_leaves_the_result(op: ReduceOp, dtype: torch.dtype) -> None:
    value = torch.tensor([0, 1, 3, 100], dtype=dtype)
    if dtype is not torch.uint8:
        value = torch.cat([value, -value])

    def act(communicator: InProcessCommunicator) -> list[float]:
        own = value.clone() if communicator.global_rank == 0 else neutral(value, op)
        communicator.allreduce(own, op).wait()
        result: list[float] = own.tolist()
        return result

    assert run_ranks(build_in_process(2), act) == [value.tolist()] * 2


def test_infinity_is_left_too() -> None:
    """A metric that is infinite must stay so when a healing rank takes part in its minimum or maximum."""
    for op, value in ((ReduceOp.MIN, float("inf")), (ReduceOp.MAX, float("-inf"))):
        tensor = torch.tensor([value])
        combined = (torch.minimum if op is ReduceOp.MIN else torch.maximum)(tensor, neutral(tensor, op))
        assert float(combined) == value


def test_a_mask_has_neutral_contributions_too() -> None:
    mask = torch.tensor([True, False])
    assert neutral(mask, ReduceOp.MAX).tolist() == [False, False]
    assert neutral(mask, ReduceOp.MIN).tolist() == [True, True]
    assert neutral(mask, ReduceOp.BAND).tolist() == [True, True]


def test_a_type_without_infinity_has_its_greatest_number() -> None:
    eight_bits = torch.tensor([1.0, -2.0]).to(torch.float8_e4m3fn)
    assert neutral(eight_bits, ReduceOp.MIN).tolist() == [448.0, 448.0]
    assert neutral(eight_bits, ReduceOp.MAX).tolist() == [-448.0, -448.0]


def test_what_has_no_such_operation_has_no_neutral_contribution() -> None:
    with pytest.raises(TypeError, match="float32"):
        neutral(torch.ones(1), ReduceOp.BOR)
