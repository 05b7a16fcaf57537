"""Every sample has a worker, every worker's bounds hold, and the largest share is as small as theory says."""

from __future__ import annotations

import itertools
import random
from fractions import Fraction

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from bagua_core.data.balancing.fair_shares import fair_shares
from bagua_core.data.partition import share

COSTS = st.lists(
    st.one_of(st.just(0.0), st.floats(0.0, 1e6), st.integers(1, 5).map(float), st.floats(1e-300, 1e-290)),
    max_size=40,
)


def imbalance(costs: list[float], shares: list[list[int]]) -> float:
    """Largest sum over the mean sum; 1.0 is perfect."""
    return largest(costs, shares) * len(shares) / sum(costs)


def largest(costs: list[float], shares: list[list[int]]) -> float:
    return max(sum(costs[place] for place in places) for places in shares)


@settings(max_examples=500)
@given(costs=COSTS, parts=st.integers(1, 9), data=st.data())
def test_shares_cover_within_bounds_and_are_never_worse_than_even_ones(
    costs: list[float], parts: int, data: st.DataObject
) -> None:
    count = len(costs)
    least = data.draw(st.integers(0, count // parts))
    most = data.draw(st.none() | st.integers(-(-count // parts), count))
    shares = fair_shares(costs, parts, least=least, most=most)
    assert sorted(place for places in shares for place in places) == list(range(count))
    assert len(shares) == parts and all(places == sorted(places) for places in shares)
    assert all(least <= len(places) <= (count if most is None else most) for places in shares)
    even = [list(share(count, parts, part)) for part in range(parts)]
    assert largest(costs, shares) <= largest(costs, even) * (1 + 1e-12)


@settings(max_examples=300)
@example(costs=[5e-324], parts=2)
@given(costs=COSTS.filter(bool), parts=st.integers(1, 9))
def test_the_largest_share_is_at_most_the_mean_and_one_sample(costs: list[float], parts: int) -> None:
    """What dealing to the least loaded guarantees: it was below the mean before its last sample."""
    shares = fair_shares(costs, parts)
    exact = [Fraction(cost) for cost in costs]  # a float's half may be no float
    mean = sum(exact) / parts
    assert largest(costs, shares) <= (mean + max(exact) * Fraction(parts - 1, parts)) * (
        1 + Fraction(1, 10**9)
    )


@settings(max_examples=150)
@given(costs=st.lists(st.floats(0.01, 100.0), min_size=1, max_size=7), parts=st.integers(1, 3))
def test_the_largest_share_is_within_four_thirds_of_the_best(costs: list[float], parts: int) -> None:
    """Graham's bound for longest first, 4/3 - 1/(3 parts), against every split there is."""
    best = min(
        max(sum(c for c, p in zip(costs, chosen, strict=True) if p == part) for part in range(parts))
        for chosen in itertools.product(range(parts), repeat=len(costs))
    )
    assert largest(costs, fair_shares(costs, parts)) <= best * (4 / 3 - 1 / (3 * parts)) * (1 + 1e-9)


@pytest.mark.parametrize(("count", "parts"), [(64, 4), (256, 8), (4096, 64)])
def test_heavy_tails_are_even_where_no_sample_is_too_large(count: int, parts: int) -> None:
    numbers = random.Random(0)
    costs = [numbers.lognormvariate(0, 1.5) for _ in range(count)]
    assert max(costs) * parts < sum(costs), "or even the best split would not be"
    assert imbalance(costs, fair_shares(costs, parts, least=2)) < 1.01
    assert imbalance(costs, [list(share(count, parts, part)) for part in range(parts)]) > 1.3


def test_large_samples_are_dealt_first() -> None:
    """Small ones first leave more to exchange than anybody would."""
    costs = [1.0] * 4000 + [20.0] * 200
    assert imbalance(costs, fair_shares(costs, 400)) == 1.0


def test_bounds_hold_where_breaking_them_would_be_fairer() -> None:
    shares = fair_shares([10.0] + [1.0] * 7, 2, most=4)
    assert sorted(map(len, shares)) == [4, 4]
    shares = fair_shares([10.0] + [1.0] * 7, 2, least=3)
    assert sorted(map(len, shares)) == [3, 5]


def test_exchanges_mend_what_longest_first_leaves() -> None:
    costs = [5.0, 5.0, 4.0, 4.0, 3.0, 3.0, 3.0]  # longest first: 5+4+3, 5+4+3 and 3 more
    assert largest(costs, fair_shares(costs, 2)) == 14.0
    assert largest([3.0, 3.0, 2.0, 2.0, 2.0], fair_shares([3.0, 3.0, 2.0, 2.0, 2.0], 2)) == 6.0


@pytest.mark.parametrize(("least", "most"), [(3, None), (0, 2)])
def test_bounds_that_no_split_keeps_are_refused(least: int, most: int | None) -> None:
    with pytest.raises(ValueError, match="5 samples do not go into 2 parts"):
        fair_shares([1.0] * 5, 2, least=least, most=most)
