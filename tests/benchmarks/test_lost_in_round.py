"""What a lost host cost the others follows from the times of their local steps."""

from __future__ import annotations

import pytest

from benchmarks.lost_in_round import WATCHED_S, Trial, trial_of


def test_a_pause_is_the_longest_of_any_survivor_after_the_loss_and_within_the_time_watched() -> None:
    killed_s = 100.0
    steady = [killed_s + 0.1 * k for k in range(-150, 151)]
    paused = [t if t < killed_s + 1.05 else t + 0.4 for t in steady]
    late = [t if t < killed_s + WATCHED_S + 1.0 else t + 3.0 for t in steady]
    found = trial_of("round", [steady, paused, late], killed_s)
    assert found == Trial(
        "round",
        pytest.approx(0.1),  # type: ignore[arg-type]
        pytest.approx(0.1),  # type: ignore[arg-type]
        pytest.approx(0.5),  # type: ignore[arg-type]
        pytest.approx(4 / 3, abs=0.7),  # type: ignore[arg-type]
    )
