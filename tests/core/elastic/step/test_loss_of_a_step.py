"""Which losses count in the job's mean."""

from __future__ import annotations

import pytest

from bagua_core.elastic.step.current_step import CurrentStep


@pytest.mark.parametrize(
    ("metrics", "healing", "numbers"),
    [
        ({}, frozenset(), (0.0, 0.0)),
        ({"accuracy": 0.5}, frozenset(), (0.0, 0.0)),
        ({"loss": 3.0}, frozenset(), (3.0, 1.0)),
        ({"loss": 3.0}, frozenset({0}), (0.0, 0.0)),
        ({"loss": 3.0}, frozenset({1}), (3.0, 1.0)),
    ],
)
def test_a_joiner_that_still_copies_does_not_count(
    metrics: dict[str, float], healing: frozenset[int], numbers: tuple[float, float]
) -> None:
    step = CurrentStep(None)
    step.metrics = metrics
    step.plan = step.plan._replace(healing=healing)
    assert step.loss_numbers() == numbers
