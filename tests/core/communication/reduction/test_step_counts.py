"""The decision whether ranks took equally many optimizer steps, from sums alone."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bagua_core.communication.reduction.step_counts import (
    LARGEST_COUNT,
    NOT_COUNTED,
    contribution,
    differ,
    explain,
)

Counts = list[int | None]


def sums(counts: Counts) -> tuple[float, float, float]:
    ranks, total, squares = (sum(numbers) for numbers in zip(*map(contribution, counts), strict=True))
    return ranks, total, squares


@given(st.lists(st.one_of(st.none(), st.integers(0, LARGEST_COUNT)), min_size=1, max_size=6))
def test_the_sums_say_what_the_counts_say(counts: Counts) -> None:
    assert differ(sums(counts)) == (len({c for c in counts if c is not None}) > 1)


def test_the_largest_world_is_exact() -> None:
    ranks, total, squares = sums([LARGEST_COUNT] * 4096)
    assert squares <= 2**24
    assert not differ((ranks, total, squares))
    assert differ(sums([LARGEST_COUNT] * 4095 + [LARGEST_COUNT - 1]))


@pytest.mark.parametrize("count", [64, 1000])
def test_counts_beyond_the_largest_are_equal_to_it(count: int) -> None:
    assert contribution(count) == contribution(LARGEST_COUNT)


def test_the_error_names_two_ranks_and_what_each_did() -> None:
    text = explain([NOT_COUNTED, 1, 1, 0], 7)
    assert "in step 7 rank 1 took 1 optimizer step and rank 3 took 0 optimizer steps" in text


@pytest.mark.parametrize("counts", [[2, NOT_COUNTED, 2], [NOT_COUNTED]])
def test_the_error_says_so_if_the_sums_are_wrong_and_no_rank_differs(counts: list[int]) -> None:
    assert "does not sum float32 exactly" in explain(counts, 7)
