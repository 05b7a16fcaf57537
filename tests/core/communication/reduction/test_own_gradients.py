"""Micro-batches of which some have no backward or several, and means that each rank keeps for itself."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from bagua_core.communication.reduction.bucket_operation import LocalMean
from bagua_core.communication.reduction.reducer import Reducer
from bagua_core.communication.step_interface import MicroBatch
from tests.core.communication.reduction.test_reducer import (
    PARTS,
    Rank,
    assert_all_equal,
    gradients,
    loss_of,
    micro_batches,
    ranks,
    whole_batch_gradients,
)
from tests.core.communication.worlds import in_process_world, run_ranks


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_step_without_its_last_micro_batch_leaves_nothing_in_the_next_one(world_size: int) -> None:
    """A script may skip a batch whose loss is not finite, or leave the loop between two micro-batches."""
    members = ranks(2) if world_size == 2 else [Rank(None)]

    def act(r: Rank) -> None:
        parts = PARTS[r.global_rank] if world_size == 2 else PARTS[0] + PARTS[1]
        for step in range(3):
            for begin, end in micro_batches(r, parts):
                r.zero_grad()
                if step or not r.engine.micro_batch.last:
                    loss_of(r.model, begin, end).backward()
            r.reducer.step_committed()

    run_ranks(members, act)
    assert_all_equal(members, whole_batch_gradients())
    assert all(len(m.engine.pairs) == 2 for m in members)


# -- each rank keeps the mean of its own samples, as with algorithms that average weights

WORTH = ((1.0, 2.0), (3.0, 7.0))  # gradients of the two micro-batches, by rank


def owners() -> list[Rank]:
    made = []
    for communicator in in_process_world(2):
        rank = Rank(communicator, build=lambda: nn.Linear(1, 1, bias=False))
        rank.reducer.close()
        rank.reducer = Reducer(rank.model.parameters(), rank.engine, operation=LocalMean())
        made.append(rank)
    return made


def step(r: Rank, backwards: int) -> float:
    for number, worth in enumerate(WORTH[r.global_rank]):
        r.engine.begin_micro_batch(MicroBatch(0.1 * (1 + number), number == 1))
        for _ in range(backwards):
            r.model(torch.full((1, 1), worth)).sum().backward()
    r.reducer.step_committed()
    return float(gradients(r.model)[0])


def mean(rank: int) -> float:
    first, second = WORTH[rank]
    return (0.1 * first + 0.2 * second) / 0.3


def test_several_backwards_in_a_step_of_micro_batches_add_up() -> None:
    found = run_ranks(owners(), lambda r: step(r, backwards=2))
    assert found == pytest.approx([2 * mean(0), 2 * mean(1)])


def test_what_the_script_leaves_in_grad_adds_up() -> None:
    found = run_ranks(owners(), lambda r: [step(r, backwards=1) for _ in range(3)])
    for rank, steps in enumerate(found):
        assert steps == pytest.approx([n * mean(rank) for n in (1, 2, 3)])


@pytest.mark.parametrize("parts", [1, 2])
def test_a_step_without_samples_keeps_what_the_script_left_in_grad(parts: int) -> None:
    """The short last batch of an epoch may have no share for a worker, whose filler counts nothing."""

    def act(r: Rank) -> list[float]:
        found = []
        for has_samples in (True, r.global_rank == 0, True):
            for number in range(parts):
                weight = (0.5 if r.global_rank else 1.0) if has_samples else 0.0
                r.engine.begin_micro_batch(MicroBatch(weight / parts, number == parts - 1))
                worth = WORTH[r.global_rank][0] if has_samples else torch.nan
                r.model(torch.full((1, 1), worth)).sum().backward()
            r.reducer.step_committed()
            found.append(float(gradients(r.model)[0]))
        return found

    assert run_ranks(owners(), act) == [[1.0, 2.0, 3.0], [3.0, 3.0, 6.0]]


def test_a_parameter_that_a_step_without_samples_does_not_use_keeps_its_gradient_too() -> None:
    def act(r: Rank) -> list[float]:
        spare = nn.Parameter(torch.ones(1))
        reducer = Reducer([*r.model.parameters(), spare], r.engine, operation=LocalMean())
        r.reducer.close()
        for weight, uses in ((0.5, True), (float(r.global_rank == 0), False)):
            r.engine.begin_micro_batch(MicroBatch(weight, True))
            loss = r.model(torch.ones(1, 1)).sum()
            (loss + spare.sum() if uses else loss).backward()
            reducer.step_committed()
        assert spare.grad is not None
        return [float(gradients(r.model)[0]), float(spare.grad)]

    assert run_ranks(owners(), act) == [[2.0, 1.0], [1.0, 1.0]]
