"""The mean at the end of a training goes in pieces of bounded size, in the same order on all workers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from bagua_core.communication.communicator import CollectiveFailed, Pending, ReduceOp
from bagua_core.communication.weights import weight_buckets
from bagua_core.communication.weights.weight_buckets import make_equal
from bagua_core.elastic.script_collectives.outside_collectives import OutsideCollectives
from bagua_core.model import sharded_tensors
from tests.core.communication.in_process import InProcessCommunicator, build_in_process
from tests.core.communication.worlds import run_ranks
from tests.core.elastic.script_collectives.test_outside_collectives import Steps, collectives

PIECE = 64


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_buckets, "EQUAL_PIECE_BYTES", PIECE, raising=False)


def parameters(rank: int) -> list[nn.Parameter]:
    """Of several dtypes, larger and smaller than a piece, with an order in memory that is not that of the numbers."""
    values = torch.Generator().manual_seed(rank)

    def drawn(*shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.randn(*shape, generator=values, dtype=torch.float64).to(dtype)

    tensors = [
        drawn(5, 9, dtype=torch.bfloat16),
        drawn(3, dtype=torch.float64),
        drawn(2, 3, 4, 4, dtype=torch.bfloat16).to(memory_format=torch.channels_last),
        drawn(0, dtype=torch.bfloat16),
        drawn(1, dtype=torch.bfloat16),
        torch.complex(drawn(7, 3, dtype=torch.float32), drawn(7, 3, dtype=torch.float32)),
    ]
    return [nn.Parameter(tensor) for tensor in tensors]


@pytest.mark.parametrize("weight", [None, 0.25])
def test_no_tensor_is_larger_than_a_piece(weight: float | None) -> None:
    own = parameters(0)
    before = [p.detach().clone() for p in own]
    sent: list[int] = []

    def average(tensor: torch.Tensor) -> torch.Tensor:
        sent.append(tensor.nbytes)
        return tensor.clone()

    make_equal(own, average, weight)
    assert max(sent) <= PIECE + 8, "a piece and its weight"
    for parameter, expected in zip(own, before, strict=True):
        assert torch.equal(parameter.detach(), expected)
        assert parameter.detach().stride() == expected.stride()


@pytest.mark.parametrize("weights", [None, (0.1, 0.4, 1.5)])
def test_the_mean_is_that_of_all(weights: tuple[float, ...] | None) -> None:
    models = [parameters(rank) for rank in range(3)]
    shares = weights or (1.0, 1.0, 1.0)
    expected = [
        sum(
            p.detach().to(torch.complex128 if p.is_complex() else torch.float64) * w
            for p, w in zip(ps, shares, strict=True)
        )
        / sum(shares)
        for ps in zip(*models, strict=True)
    ]

    def act(communicator: InProcessCommunicator) -> None:
        rank = communicator.global_rank

        def average(tensor: torch.Tensor) -> torch.Tensor:
            result = tensor.clone()
            communicator.allreduce(result, ReduceOp.AVG).wait()
            return result

        make_equal(models[rank], average, None if weights is None else weights[rank])

    run_ranks(build_in_process(3), act)
    for model in models:
        for own, first, mean in zip(model, models[0], expected, strict=True):
            assert torch.equal(own.detach(), first.detach())
            torch.testing.assert_close(own.detach(), mean.to(own.dtype))


def test_a_loss_between_two_calls_scales_nothing() -> None:
    """Equal models of three members with the weights 1, 1 and 4; the third is lost after the first call."""
    own = [nn.Parameter(torch.ones(30))]
    calls = 0

    def average(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return tensor * ((1 + 1 + 4) / 3 if calls == 1 else 1.0)

    make_equal(own, average, 1.0)
    assert torch.equal(own[0], torch.ones(30))


def test_workers_with_smaller_shards_make_as_many_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each call is agreed on among the workers with all shards."""
    monkeypatch.setattr(weight_buckets, "largest_part", lambda parameter: 40, raising=False)
    calls = []
    for size in (40, 33, 16, 2, 0):
        own, sent = [nn.Parameter(torch.randn(size)) for _ in range(2)], list[int]()
        before = [p.detach().clone() for p in own]

        def average(tensor: torch.Tensor, sent: list[int] = sent) -> torch.Tensor:
            sent.append(tensor.numel())
            return tensor.clone()

        make_equal(own, average)
        assert all(torch.equal(p, b) for p, b in zip(own, before, strict=True))
        assert all(sent), "no collective of nothing"
        calls.append(len(sent))
    assert calls == [5] * 5


@pytest.mark.parametrize(
    ("shape", "placements", "mesh", "largest"),
    [
        ((10, 4), ("S(0)",), (4,), 12),
        ((1, 4), ("S(0)",), (4,), 4),
        ((10, 4), ("R",), (4,), 40),
        ((10, 4), ("S(1)", "S(0)"), (3, 2), 10),
        ((10, 4), ("_S(0, 2)", "S(0)"), (2, 2), 12),
        ((10, 4), ("_S(0, 3)", "S(0)"), (2, 2), 40),  # parts that are no boxes
    ],
)
def test_the_largest_part_is_the_same_on_all(
    monkeypatch: pytest.MonkeyPatch,
    shape: tuple[int, ...],
    placements: tuple[str, ...],
    mesh: tuple[int, ...],
    largest: int,
) -> None:
    sharded: Any = SimpleNamespace(
        shape=shape, placements=placements, device_mesh=SimpleNamespace(shape=mesh), numel=lambda: 40
    )
    monkeypatch.setattr(sharded_tensors, "is_sharded", lambda tensor: tensor is sharded)
    assert sharded_tensors.largest_part(sharded) == largest
    assert sharded_tensors.largest_part(torch.ones(3, 2)) == 6


def test_a_loss_in_the_middle() -> None:
    """Of the third piece one worker has the result, one misses it and is answered from the log, and one is lost."""
    world, rest = build_in_process(3), build_in_process(2, generation=2)
    models = [[nn.Parameter(torch.full((70,), 1.0 + rank, dtype=torch.bfloat16))] for rank in range(3)]
    ends: dict[int, OutsideCollectives] = {}
    for communicator in world:
        ends[communicator.global_rank] = collectives(communicator, Steps(communicator, in_step=False))
    logs = [ends[rank]._state.operations for rank in range(3)]
    most_logged = 0

    def act(communicator: InProcessCommunicator) -> None:
        nonlocal most_logged
        rank = communicator.global_rank
        end, calls, reductions = ends[rank], 0, list[Pending]()
        member: Any = end._member

        def wait(pending: Pending) -> None:
            pending.wait()
            if rank == 1 and calls == 3 and member.communicator is world[1] and pending in reductions:
                raise CollectiveFailed("lost", ("10.0.0.2",))

        def allreduce(tensor: torch.Tensor, op: ReduceOp = ReduceOp.SUM) -> Pending:
            pending = InProcessCommunicator.allreduce(communicator, tensor, op)
            reductions.append(pending)
            return pending

        def follow(**how: Any) -> None:
            member.communicator, member.broken = rest[rank], False
            mine = torch.tensor([len(logs[rank].results())])
            rows = torch.zeros((2, 1), dtype=torch.int64)
            rest[rank].allgather(rows, mine).wait()
            assert rows.flatten().tolist() == [3, 2]
            if rank == 1:
                logs[1].replace(logs[0].results(), same_step=True)

        def broken(error: CollectiveFailed) -> None:
            member.broken = True

        communicator.allreduce = allreduce  # type: ignore[method-assign]
        member.wait_unlearned, member.follow, member.break_generation = wait, follow, broken

        def average(tensor: torch.Tensor) -> torch.Tensor:
            nonlocal calls, most_logged
            calls += 1
            if rank == 2 and calls == 4:
                communicator.lose("10.0.0.2")
                raise SystemExit
            result = end.operate(tensor, ReduceOp.AVG, finishing=True)
            most_logged = max(most_logged, sum(r.nbytes for r in logs[rank].results()))
            return result

        try:
            make_equal(models[rank], average)
        except SystemExit:
            assert rank == 2

    run_ranks(world, act)
    expected = torch.full((70,), 1.5, dtype=torch.bfloat16)
    expected[: 3 * 16] = 2.0
    for rank in (0, 1):
        assert torch.equal(models[rank][0].detach(), expected)
    assert most_logged <= PIECE + 8, "the log keeps the newest piece alone"
