"""Decides after which steps a checkpoint is due. Pure: time and durations are arguments.

Every rank must pick the same step. By steps, the step's number decides. By seconds, only one rank's clock can decide,
so at agreed steps, called looks, global rank 0 decides whether one is due and at which step all look again.
"""

from __future__ import annotations

from dataclasses import dataclass

from bagua_contract.checkpoint_every import CheckpointEvery

_MOST_STEPS_AHEAD = 1_000_000
_LOOKS = 8
"""Minimum number of looks between two checkpoints when steps keep their pace. If steps become k times slower, a look
comes late by at most k of these parts."""
_KEPT_PER_STEP = 0.99


@dataclass(frozen=True, slots=True)
class Look:
    """Rank 0's decision at a look. next_step: the step after which all look again."""

    is_due: bool
    next_step: int


def is_due_by_steps(every: CheckpointEvery, step: int) -> bool:
    """Tells whether a checkpoint is due after `step` committed steps, by their number alone."""
    return every.steps > 0 and step > 0 and step % every.steps == 0


@dataclass(frozen=True, slots=True)
class Pace:
    """The recent duration of steps: earlier ones count less and less."""

    steps: float = 0.0
    seconds: float = 0.0

    def after(self, steps: int, seconds: float) -> Pace:
        kept = _KEPT_PER_STEP**steps
        return Pace(self.steps * kept + steps, self.seconds * kept + seconds)

    @property
    def mean_step_s(self) -> float:
        return self.seconds / self.steps if self.steps else 0.0


def look(every: CheckpointEvery, step: int, since_last_s: float, pace: Pace) -> Look:
    """Returns rank 0's decision at a look after `step` (by seconds). since_last_s: time since the last checkpoint was
    due."""
    mean_step_s = pace.mean_step_s
    is_due = since_last_s + mean_step_s / 2 >= every.seconds
    left_s = every.seconds if is_due else every.seconds - since_last_s
    # half of it: the pace may change before the next look
    ahead_s = min(left_s / 2, every.seconds / _LOOKS)
    if mean_step_s <= 0:
        return Look(is_due, step + 1)
    # The first steps are slow, and a pace seen over few steps is no forecast for many.
    most = min(4 * pace.steps, _MOST_STEPS_AHEAD)
    return Look(is_due, step + max(1, round(min(ahead_s / mean_step_s, most))))
