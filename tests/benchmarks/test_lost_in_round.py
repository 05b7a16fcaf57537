"""What a lost host cost the others follows from their logs."""

from __future__ import annotations

import pytest

from benchmarks.lost_in_round import WATCHED_S, Step, trial_of

KILLED_S = 100.0


def steps(pause_s: float, paused_at_s: float) -> list[Step]:
    """Ten a second, of 16 samples before the loss and 20 after it, with one pause."""
    times = [KILLED_S + 0.1 * k + 0.05 for k in range(-150, 151)]
    return [Step(t if t < paused_at_s else t + pause_s, 16 if t < KILLED_S else 20) for t in times]


def test_a_pause_is_the_longest_of_any_survivor_after_the_loss_and_within_the_time_watched() -> None:
    late = steps(3.0, KILLED_S + WATCHED_S + 1.0)
    found = trial_of("round", [late, steps(0.4, KILLED_S + 1.0)], KILLED_S)
    assert (found.step_s, found.usual_s) == pytest.approx((0.1, 0.1))
    assert found.pause_s == pytest.approx(0.5)
    assert found.kept == pytest.approx((100 + 96) * 20 / (2 * 100 * 16))
