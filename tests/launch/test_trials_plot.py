"""The points of a plot of trials: rates over the time of training, and which settings are kept."""

from __future__ import annotations

from pathlib import Path

import pytest

from bagua_agent.autotune.study_records import Study, Trial
from bagua_agent.base.errors import UserError
from bagua_contract.step_settings import StepSettings
from bagua_launch.trials_plot import plot_trials, points_of

ROUTE = StepSettings(hierarchical=True)
TRIALS = (
    Trial(StepSettings(), 100, 10.0, 40.0),
    Trial(ROUTE, 200, 10.0, 60.0),
    Trial(StepSettings(4096), 50, 10.0, 90.0),
)


def test_rates_times_and_the_settings_that_are_kept() -> None:
    points = points_of(Study(1, "w", trials=TRIALS))
    assert [(p.number, p.at_s, p.rate, p.best) for p in points] == [
        (1, 40.0, 10.0, 10.0), (2, 60.0, 20.0, 20.0), (3, 90.0, 5.0, 20.0),
    ]  # fmt: skip
    assert [p.is_chosen for p in points] == [False, True, False]
    assert [p.is_scripted for p in points] == [True, False, False]


def test_trials_of_a_record_without_times_stand_one_after_the_other() -> None:
    points = points_of(Study(1, "w", trials=tuple(Trial(t.settings, t.steps, t.seconds) for t in TRIALS)))
    assert [p.at_s for p in points] == [10.0, 20.0, 30.0]


def test_settings_that_gain_too_little_are_not_marked() -> None:
    hardly = (Trial(StepSettings(), 100, 10.0), Trial(ROUTE, 101, 10.0))
    assert [p.is_chosen for p in points_of(Study(1, "w", trials=hardly))] == [True, False]


def test_a_long_order_is_cut() -> None:
    order = tuple(range(100_0))
    (point,) = points_of(Study(1, "w", trials=(Trial(StepSettings(4096, True, "bytegrad", order), 1, 1.0),)))
    assert len(point.label) <= 70


def test_nothing_to_draw_is_said(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="has ended no trial yet"):
        plot_trials("demo", Study(1, "w"), tmp_path / "x.png")
