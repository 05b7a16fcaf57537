"""Batches by number or by budget: every sample in one of them, whatever the limits."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bagua_core.data.balancing.epoch_batches import EpochBatches, Limits, epoch_batches
from bagua_core.data.partition import batch_count, epoch_order, global_batch


def batches_of(
    complexities: Sequence[float],
    limits: Limits,
    epoch: int = 0,
    shuffle: bool = True,
    drop_last: bool = False,
) -> EpochBatches:
    return epoch_batches(
        epoch_order(3, epoch, len(complexities), shuffle),
        lambda indices: [complexities[i] for i in indices],
        limits,
        seed=3,
        epoch=epoch,
        shuffle=shuffle,
        drop_last=drop_last,
    )


@settings(max_examples=300)
@given(
    complexities=st.lists(st.integers(0, 50).map(float), min_size=1, max_size=60),
    most=st.integers(1, 9),
    budget=st.none() | st.floats(1.0, 100.0),
    similar=st.integers(1, 4),
    shuffle=st.booleans(),
)
def test_every_sample_is_in_one_batch_within_the_limits(
    complexities: list[float], most: int, budget: float | None, similar: int, shuffle: bool
) -> None:
    made = batches_of(complexities, Limits(most, budget, similar), shuffle=shuffle)
    batches = [made.indices(batch) for batch in range(len(made))]
    assert sorted(index for batch in batches for index in batch) == list(range(len(complexities)))
    assert [len(batch) for batch in batches] == [made.size(batch) for batch in range(len(made))]
    for batch in batches:
        assert 1 <= len(batch) <= most
        assert budget is None or len(batch) == 1 or sum(complexities[i] for i in batch) <= budget
    if budget is None:
        assert len(made) == batch_count(len(complexities), most, False)


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("similar", [1, 3])
def test_without_a_budget_the_short_batch_is_the_plain_one(drop_last: bool, similar: int) -> None:
    """Sorted, it would always be the samples that are largest, and with drop_last they would never be used."""
    complexities = [float(i) for i in range(50)]
    made = batches_of(complexities, Limits(8, similar=similar), drop_last=drop_last)
    order = epoch_order(3, 0, 50, True)
    assert len(made) == batch_count(50, 8, drop_last)
    used = sorted(i for batch in range(len(made)) for i in made.indices(batch))
    assert used == sorted(order[: 48 if drop_last else 50].tolist())
    if not drop_last:
        assert made.indices(6) == global_batch(order, 6, 8).tolist()
    if similar == 1:
        assert all(made.indices(b) == global_batch(order, b, 8).tolist() for b in range(len(made)))


def test_similar_samples_meet_and_batches_still_differ_from_epoch_to_epoch() -> None:
    complexities = torch.rand(320, generator=torch.Generator().manual_seed(0)).tolist()

    def ranges(limits: Limits, epoch: int = 0) -> list[float]:
        made = batches_of(complexities, limits, epoch)
        values = [[complexities[i] for i in made.indices(b)] for b in range(len(made))]
        return [max(v) - min(v) for v in values]

    assert max(ranges(Limits(16, similar=10))) < 0.25 < 0.6 < min(ranges(Limits(16)))
    first, second = (batches_of(complexities, Limits(16, similar=5), epoch) for epoch in (0, 1))
    assert {frozenset(first.indices(b)) for b in range(20)}.isdisjoint(
        frozenset(second.indices(b)) for b in range(20)
    )
    sums = [sum(complexities[i] for i in first.indices(b)) for b in range(5)]
    assert sums != sorted(sums), "a run does not go from small to large"


def test_a_budget_fills_batches_of_similar_samples_well() -> None:
    complexities = [float(1 + i % 40) for i in range(2000)]
    made = batches_of(complexities, Limits(500, budget=400.0, similar=8))
    filled = [sum(complexities[i] for i in made.indices(b)) / 400.0 for b in range(len(made))]
    assert sum(f > 0.85 for f in filled) > 0.85 * len(filled)


def test_only_limits_that_need_complexities_ask_for_them() -> None:
    def ask(indices: Sequence[int]) -> list[float]:
        raise AssertionError("they are not needed")

    order = torch.arange(10)
    made = epoch_batches(order, ask, Limits(4), seed=0, epoch=0, shuffle=True, drop_last=False)
    assert [made.indices(b) for b in range(3)] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
