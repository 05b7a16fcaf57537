"""What the report of benchmarks.autotune says of parts that have run."""

from __future__ import annotations

import pytest

from benchmarks.autotune import in_words, is_met
from benchmarks.autotune_job import MODELS

GRID = {
    "part": "grid",
    "link": "1gbit",
    "model": "wide",
    "rates": {"as the script says": 10.0, "buckets of 1 MiB": 20.0},
}
TUNE = {
    "part": "tune",
    "link": "1gbit",
    "model": "wide",
    "kept": "buckets of 1 MiB",
    "trials": [{}],
    "lost_share": 0.04,
}


def test_kept_settings_are_compared_by_their_rates_in_the_grid() -> None:
    said = in_words([GRID, TUNE])
    assert "buckets of 1 MiB" in said and "+100.0%" in said and "| yes |" in said
    assert "| no  |" in in_words([GRID, {**TUNE, "kept": "as the script says"}])


def test_a_study_without_its_grid_is_named() -> None:
    assert "no grid has buckets of 1 MiB" in in_words([TUNE])


def test_the_time_after_a_drop_is_said() -> None:
    grid = {**GRID, "link": "100mbit"}
    seen = [{"after_s": 10.0, "rate": 5.0}, {"after_s": 40.0, "rate": 18.5}]
    drop = {"part": "drop", "link": "1gbit", "model": "wide", "seen": seen}
    assert "90% of the new best after 40 s" in in_words([grid, drop])
    assert "90% of the new best never" in in_words([drop])


@pytest.mark.parametrize(
    ("kept", "best", "scripted", "lost_share", "met"),
    [
        (20.0, 20.0, 10.0, 0.04, True),
        (18.9, 20.0, 10.0, 0.04, False),
        (20.0, 20.0, 10.0, 0.06, False),
        (10.0, 10.5, 10.0, 0.0, True),
        (9.9, 10.0, 10.0, 0.0, False),
        (11.5, 12.0, 11.0, 0.0, True),
    ],
)
def test_what_is_asked_for(kept: float, best: float, scripted: float, lost_share: float, met: bool) -> None:
    assert is_met(kept, best, scripted, lost_share) is met


def test_models_are_small_enough_for_slow_links() -> None:
    assert all(shape.gradient_bytes <= 4_000_000 for shape in MODELS.values())
