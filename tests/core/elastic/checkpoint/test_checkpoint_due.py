"""A checkpoint is due on all ranks after the same step, about as often as was asked."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from bagua_contract.checkpoint_every import CheckpointEvery
from bagua_core.elastic.checkpoint.due import Pace, is_due_by_steps, look


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("500", CheckpointEvery(steps=500)),
        ("1", CheckpointEvery(steps=1)),
        ("30s", CheckpointEvery(seconds=30.0)),
        ("0.5s", CheckpointEvery(seconds=0.5)),
        ("1000000s", CheckpointEvery(seconds=1e6)),
    ],
)
def test_the_setting_is_read_and_written(text: str, value: CheckpointEvery) -> None:
    assert CheckpointEvery.decode(text) == value
    assert value.encode() == text


@pytest.mark.parametrize("text", ["", "0", "0s", "-1", "5 s", "5m", "1e3", "s", "1.5", "nan", "infs", "0.0s"])
def test_what_is_no_setting_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        CheckpointEvery.decode(text)


def test_by_steps() -> None:
    every = CheckpointEvery(steps=3)
    assert [step for step in range(10) if is_due_by_steps(every, step)] == [3, 6, 9]
    assert not is_due_by_steps(CheckpointEvery(seconds=3), 3)


def due_times(seconds: float, step_s: list[float]) -> tuple[list[float], int]:
    """When checkpoints are due in steps of these durations, and how many looks that took."""
    every = CheckpointEvery(seconds=seconds)
    now_s, last_s, looks, at = 0.0, 0.0, 0, 1
    before: tuple[int, float] | None = None
    pace = Pace()
    times = []
    for step, duration_s in enumerate(step_s, 1):
        now_s += duration_s
        if step < at:
            continue
        looks += 1
        if before is not None:
            pace = pace.after(step - before[0], now_s - before[1])
        decided = look(every, step, now_s - last_s, pace)
        before, at = (step, now_s), decided.next_step
        assert at > step
        if decided.is_due:
            times.append(now_s)
            last_s = now_s
    return times, looks


def test_by_seconds_even_steps_take_few_looks() -> None:
    times, looks = due_times(10.0, [0.1] * 10_000)
    gaps = [b - a for a, b in pairwise(times)]
    assert len(times) in range(97, 102) and max(gaps) < 10.5 and min(gaps) > 9.5
    assert looks < 13 * len(times), "six of an eighth of the time, then halves of what is left of 25 steps"


def test_by_seconds_uneven_steps() -> None:
    chance = random.Random(1)
    times, _ = due_times(10.0, [chance.choice([0.05, 0.1, 0.5]) for _ in range(20_000)])
    gaps = [b - a for a, b in pairwise(times)]
    assert max(gaps) < 15 and min(gaps) > 9


def test_by_seconds_steps_that_become_a_hundred_times_slower() -> None:
    """As where a job goes from a small to a large sequence length."""
    times, _ = due_times(10.0, [0.01] * 20_000 + [1.0] * 2_000)
    gaps = [b - a for a, b in pairwise(times)]
    assert max(gaps) < 10 + 100 * 10 / 8 + 2
    assert max(gaps[-50:]) < 12


def test_by_seconds_steps_longer_than_the_time() -> None:
    times, _ = due_times(1.0, [5.0] * 20)
    assert len(times) == 20
