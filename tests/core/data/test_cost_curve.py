"""Costs are learned from sums, rise with complexity, and every worker learns the same."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bagua_core.data.balancing.cost_curve import CostCurve, Sums, fitted, knots_of, pieces_of
from bagua_core.data.balancing.cost_learning import CHANGE_THAT_COUNTS, EVERY_STEPS, CostLearner
from bagua_core.data.balancing.fair_shares import fair_shares, imbalance

SHAPES: dict[str, Callable[[float], float]] = {
    "proportional": lambda c: 0.001 * c,
    "mostly the same": lambda c: 0.05 + 0.0003 * c,
    "quadratic": lambda c: 0.001 * c + 1e-5 * c * c,
    "square root": lambda c: 0.01 * c**0.5,
}


@given(
    complexities=st.lists(st.integers(0, 1000).map(float), min_size=1, max_size=50), pieces=st.integers(1, 8)
)
def test_knots_rise_and_pieces_add_up(complexities: list[float], pieces: int) -> None:
    knots = knots_of(complexities, pieces)
    assert 1 <= len(knots) <= max(1, pieces - 1)
    assert list(knots) == sorted(set(knots)) and knots[0] > 0
    for complexity in complexities:
        parts = pieces_of(complexity, knots)
        assert len(parts) == len(knots) + 1 and min(parts) >= 0
        assert sum(parts) == pytest.approx(complexity)


@settings(max_examples=40, deadline=None)
@given(
    rows=st.lists(
        st.tuples(st.lists(st.integers(0, 200).map(float), min_size=1, max_size=5), st.floats(0.001, 10.0)),
        min_size=30,
        max_size=40,
    )
)
def test_whatever_was_measured_costs_rise(rows: list[tuple[list[float], float]]) -> None:
    knots = (10.0, 50.0, 120.0)
    sums = Sums.zero(knots)
    for complexities, seconds in rows:
        sums = sums.plus(Sums.of_row(complexities, seconds, knots))
    curve = fitted(sums, knots)
    if curve is None:
        return  # nothing to learn: all of complexity 0
    costs = [curve.cost(float(c)) for c in range(0, 300, 7)]
    assert costs == sorted(costs) and costs[0] >= 0 and costs[-1] > 0


def test_an_exact_line_is_found() -> None:
    knots = (10.0, 50.0)
    true = CostCurve(knots, 0.3, 0.02, (0.001, 0.004, 0.0005))
    numbers = random.Random(0)
    sums = Sums.zero(knots)
    for _ in range(4000):
        row = [numbers.uniform(0, 100) for _ in range(numbers.randrange(1, 9))]
        sums = sums.plus(Sums.of_row(row, true.step_s(row), knots))
    found = fitted(sums, knots)
    assert found is not None
    # the wish for smooth slopes takes a little
    assert [found.cost(c) for c in (5.0, 30.0, 90.0)] == pytest.approx(
        [true.cost(c) for c in (5.0, 30.0, 90.0)], rel=0.1
    )


def test_too_few_rows_say_nothing() -> None:
    knots = (1.0,)
    sums = Sums.zero(knots)
    for _ in range(7):
        sums = sums.plus(Sums.of_row([1.0, 3.0], 0.1, knots))
    assert fitted(sums, knots) is None  # four columns
    assert fitted(sums.plus(Sums.of_row([1.0, 3.0], 0.1, knots)), knots) is not None


def learned(
    true: Callable[[float], float], workers: int = 4, steps: int = 12 * EVERY_STEPS, noise: float = 0.05
) -> tuple[list[CostLearner], list[float], list[float]]:
    """Workers that balance by what they have learned. Returns them, and the imbalances of true costs by learned costs
    and by complexity, over the second half."""
    numbers = random.Random(1)
    pool = [float(max(1, int(numbers.lognormvariate(4, 1)))) for _ in range(5000)]
    learners = [CostLearner(knots_of(pool[:1024])) for _ in range(workers)]
    balanced, plain = [], []
    for step in range(steps):
        row = numbers.sample(pool, 64)
        costs = [true(c) for c in row]
        curve = learners[0].in_force(step)
        assert all(learner.in_force(step) == curve for learner in learners)
        shares = fair_shares([curve.cost(c) for c in row] if curve else row, workers)
        if step >= steps // 2:
            balanced.append(imbalance(costs, shares))
            plain.append(imbalance(costs, fair_shares(row, workers)))
        totals = None
        if CostLearner.is_due(step):
            totals = sum((learner.contribution(step) for learner in learners), torch.zeros(1))
        for learner, places in zip(learners, shares, strict=True):
            if totals is not None:
                learner.agreed(step, totals)
            seconds = (0.5 + sum(costs[p] for p in places)) * numbers.lognormvariate(0, noise)
            if numbers.random() < 0.01:
                seconds += 100.0  # a pause
            learner.measured([row[p] for p in places], seconds)
    return learners, balanced, plain


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


@pytest.mark.parametrize("shape", list(SHAPES))
def test_learned_costs_balance_what_complexities_do_not(shape: str) -> None:
    learners, balanced, plain = learned(SHAPES[shape])
    if shape == "proportional":
        assert mean(balanced) < 1.02
    else:
        assert mean(balanced) - 1 < 0.75 * (mean(plain) - 1)
        assert learners[0].in_force(10**9) is not None


def test_small_changes_replace_nothing() -> None:
    """Each new curve throws away batches that were loaded ahead."""
    learners, _, _ = learned(SHAPES["square root"], noise=0.01)
    assert 1 <= len(learners[0]._curves) <= 3
    curve = learners[0].in_force(10**9)
    assert curve is not None and not curve.differs(curve, 0.0)
    scaled = CostCurve(curve.knots, 9.0, 2 * curve.per_sample, tuple(2 * s for s in curve.slopes))
    assert not scaled.differs(curve, 1e-9), "only proportions matter"
    assert curve.differs(None, CHANGE_THAT_COUNTS), "without a curve the complexity is the cost"


def test_state_goes_to_whoever_heals() -> None:
    (first, *_), _, _ = learned(SHAPES["mostly the same"], steps=4 * EVERY_STEPS)
    second = CostLearner(first._knots)
    second.measured([1.0], 5.0)  # its own rows are not the job's
    second.load_state_dict(first.state_dict())
    for step in (0, EVERY_STEPS, 10 * EVERY_STEPS):
        assert second.in_force(step) == first.in_force(step)
    totals = torch.rand(Sums.length(first._knots), dtype=torch.float64)
    for learner in (first, second):
        learner.agreed(5 * EVERY_STEPS - 1, totals)
    assert all(torch.equal(first.state_dict()[k], second.state_dict()[k]) for k in ("totals", "curves"))


def test_curves_of_earlier_steps_stay() -> None:
    """The ledger asks for the split of steps that are over."""
    learners, _, _ = learned(SHAPES["mostly the same"], steps=3 * EVERY_STEPS)
    assert learners[0].in_force(EVERY_STEPS - 1) is None
    assert learners[0].in_force(2 * EVERY_STEPS) is not None
