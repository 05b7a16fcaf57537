"""The throughput of several workers follows from their logs, and their loss from their leases."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import uneven_losses
from benchmarks.uneven_workers import throughput


def test_throughput_counts_all_workers_and_leaves_the_beginning_and_the_end_out(tmp_path: Path) -> None:
    # after 10 slow seconds one worker does 8 samples a second and the other 2; the end is slow again
    fast = [(10.0 + k, 8) for k in range(100)] + [(1000.0, 8)]
    slow = [(10.0 + k, 2) for k in range(100)] + [(2000.0, 2)]
    for name, lines in (("a", [(0.0, 8), *fast]), ("b", [(0.0, 2), *slow])):
        (tmp_path / f"{name}.log").write_text("".join(f"{t} {n}\n" for t, n in lines))
    assert throughput(tmp_path) == pytest.approx(10.0, rel=0.05)


def test_leases_by_speed_take_more_local_steps_and_end_lower_than_equal_ones() -> None:
    """As the figures of rounds are explained in docs/algorithms.md, after one epoch of five."""
    pytest.importorskip("sklearn")
    steps, more, equal, by_speed = uneven_losses.trials(epochs=1, seed=0)
    assert (steps.most_steps, more.most_steps, equal.most_steps) == (176, 197, 176)
    assert 176 < more.most_steps < by_speed.most_steps < 1.25 * 176
    assert equal.training == pytest.approx(steps.training, rel=0.05)
    assert by_speed.training == pytest.approx(more.training, rel=0.05)
    assert by_speed.training < 0.95 * equal.training
