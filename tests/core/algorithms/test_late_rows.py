"""Rows that have their first gradient after the warm-up, under QAdam on several ranks."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

from bagua_core.algorithms import QAdam, QAdamOptimizer, late_elements
from bagua_core.algorithms.qadam_optimizer import FREEZE_EVERY
from bagua_core.communication.communicator import Communicator
from bagua_core.communication.compressed.compressed_sum import LEAST_ELEMENTS
from tests.core.algorithms.gradient_ranks import Rank, assert_equal_bits, break_at, exact, world_on_nodes
from tests.core.communication.worlds import in_process_world, run_ranks

WARMUP = 3
ROWS, EARLY, WIDTH = 700, 540, 32
BITS = pytest.mark.parametrize("bits", [8, 1])


@pytest.fixture(autouse=True)
def in_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if there were more of them."""
    monkeypatch.setattr(late_elements, "WHOLE", 0)


class Rows(nn.Module):
    """Rows below `used` take part."""

    def __init__(self) -> None:
        super().__init__()
        self.used = EARLY
        self.weight = nn.Parameter(torch.randn(ROWS, WIDTH) / 8)
        self.register_buffer("out", torch.randn(ROWS, 3) / 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(x[:, :WIDTH] @ self.weight[: self.used].T)
        found: torch.Tensor = hidden @ self.out[: self.used]
        return found


assert EARLY * WIDTH >= LEAST_ELEMENTS


def rank(communicator: Communicator | None, bits: int) -> Rank:
    def optimizer(parameters: Any) -> QAdamOptimizer:
        return QAdamOptimizer(parameters, lr=1e-3, warmup_steps=WARMUP, betas=(0.8, 0.99))

    return Rank(communicator, QAdam(bits=bits), build=Rows, optimizer=optimizer)


def use_all(members: Sequence[Rank]) -> None:
    for member in members:
        member.inner.used = ROWS


def assert_alike(members: Sequence[Rank]) -> None:
    def tensors(member: Rank) -> list[torch.Tensor]:
        state = member.optimizer.state[next(iter(member.inner.parameters()))]
        return [t.clone() for t in state.values() if isinstance(t, torch.Tensor)]

    assert_equal_bits([[*m.parameters(), *tensors(m)] for m in members])


def steps(members: Sequence[Rank], count: int) -> None:
    for _ in range(count):
        assert all(run_ranks(members, lambda r: r.step()))
        assert_alike(members)


def late_count(member: Rank) -> int:
    assert isinstance(member.optimizer, QAdamOptimizer)
    return member.optimizer.late_count(next(iter(member.inner.parameters())))


def warm(world: Sequence[Communicator], bits: int) -> list[Rank]:
    members = [rank(c, bits) for c in world]
    steps(members, WARMUP + 2)
    assert late_count(members[0]) == (ROWS - EARLY) * WIDTH
    use_all(members)
    return members


@BITS
@pytest.mark.parametrize("nodes", [[1, 1, 1], [2, 1]], ids=["flat", "nodes"])
@pytest.mark.parametrize("whole", [0, ROWS * WIDTH], ids=["in segments", "whole"])
def test_their_gradients_are_exact_and_they_train(
    bits: int, nodes: list[int], whole: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(late_elements, "WHOLE", whole)
    members = warm(world_on_nodes(nodes), bits)
    alone = rank(None, bits)
    use_all([alone])
    begin = members[0].parameters()[0]
    for _ in range(3):
        alone.inner.load_state_dict(members[0].inner.state_dict())
        (wanted,), _ = exact(alone, len(members))
        steps(members, 1)
        (found,) = members[0].gradients()
        # A sum over samples is rounded by its largest terms; the order of its terms depends on torch's threads.
        rounding = 8 * torch.finfo(wanted.dtype).eps * float(wanted.abs().max())
        torch.testing.assert_close(found[EARLY:], wanted[EARLY:], rtol=1e-5, atol=rounding)
        assert not torch.allclose(found[:EARLY], wanted[:EARLY], rtol=1e-5, atol=rounding), (
            "nothing is compressed"
        )
    moved = (members[0].parameters()[0] - begin)[EARLY:]
    assert bool((moved.abs() > 1e-4).any(dim=1).all()), "some rows do not train"


@BITS
def test_frozen_in_time_they_are_compressed_as_the_others(bits: int) -> None:
    members = warm(in_process_world(3), bits)
    steps(members, FREEZE_EVERY - 2)
    assert late_count(members[0]) > 0
    steps(members, 1)
    assert late_count(members[0]) == 0
    alone = rank(None, bits)
    use_all([alone])
    alone.inner.load_state_dict(members[0].inner.state_dict())
    (wanted,), _ = exact(alone, len(members))
    steps(members, 1)
    (found,) = members[0].gradients()
    assert not torch.allclose(found[EARLY:], wanted[EARLY:], rtol=1e-5, atol=1e-9)
    steps(members, 2)
    assert all(bool(t.isfinite().all()) for t in members[0].parameters())


@BITS
def test_one_that_heals_while_rows_are_late_ends_alike(bits: int) -> None:
    members = warm(in_process_world(2), bits)
    newcomer = rank(None, bits)
    newcomer.engine.step = members[0].engine.step
    use_all([newcomer])
    for place, (member, communicator) in enumerate(
        zip([*members, newcomer], in_process_world(3, 2), strict=True)
    ):
        member.move_to(communicator, (24, 24) if place == 2 else [(0, 10), (10, 24)][place])
        member.engine.healing = frozenset({2})
    kept = [copy.deepcopy(members[0].inner.state_dict()), copy.deepcopy(members[0].optimizer.state_dict())]
    usual = newcomer.engine.reduction_done

    def copied_meanwhile(pair: tuple[float, float] | None) -> None:
        newcomer.inner.load_state_dict(kept[0])
        newcomer.optimizer.load_state_dict(kept[1])
        usual(pair)

    newcomer.engine.reduction_done = copied_meanwhile  # type: ignore[method-assign]
    everyone = [*members, newcomer]
    steps(everyone, 1)
    newcomer.engine.reduction_done = usual  # type: ignore[method-assign]
    for member in everyone:
        member.engine.healing = frozenset()
        member.bring(member.engine.communicator(), None)
    steps(everyone, FREEZE_EVERY)
    assert late_count(newcomer) == 0


@BITS
@pytest.mark.parametrize(("what", "number"), [("alltoall", 1), ("allgather", 1), ("allreduce", 1)])
def test_a_step_with_late_rows_that_broke_is_done_again(bits: int, what: str, number: int) -> None:
    world = in_process_world(3)
    members, steady = warm(world, bits), warm(in_process_world(3), bits)
    for several in (members, steady):
        steps(several, 1)
    happened = break_at(world, what, number)
    assert not any(run_ranks(members, lambda r: r.step()))
    assert happened.is_set()
    assert_alike([members[0], steady[0]])
    for several in (members, steady):
        for member, communicator in zip(several, in_process_world(3, 2), strict=True):
            member.move_to(communicator)
        steps(several, FREEZE_EVERY)
    assert_alike([members[0], steady[0]])


@BITS
def test_one_that_was_a_step_behind_does_not_tear_the_replicas_apart(bits: int) -> None:
    """Its vote failed where the others' succeeded, so it copies the state, outside a step, in a generation of as many
    ranks."""
    members = warm(in_process_world(2), bits)
    steps(members, 2)
    behind, ahead = members[1], members[0]
    # what a rank that missed the commit holds: the sums of the step before
    old = copy.copy(behind.model._exchange._operation._kept)  # type: ignore[attr-defined]
    steps(members, 1)
    behind.model._exchange._operation._kept = old  # type: ignore[attr-defined]
    behind.inner.load_state_dict(copy.deepcopy(ahead.inner.state_dict()))
    behind.optimizer.load_state_dict(copy.deepcopy(ahead.optimizer.state_dict()))
    for member, communicator in zip(members, in_process_world(2, 2), strict=True):
        member.move_to(communicator)
    steps(members, 2)
