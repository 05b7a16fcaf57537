"""Defines the uses of a worker's time, by the names in its reports to the agent, and the bounds of step times."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum

# Upper bounds of the histogram of step times, in seconds; one more count is of what is longer.
STEP_TIME_BOUNDS_S = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0,
)  # fmt: skip


class TimeUse(Enum):
    """Uses of the time of the script's thread. STEP alone is goodput; all together are the time since the worker met
    its agent.

    START: before its first generation. STEP: steps that were committed, with what the script does between them.
    FAILED_STEP: steps that were rolled back, with the wait for a peer that was lost; of a round the average alone, for
    its local steps are kept. HANG: the last wait of such a step, if it was long: a peer was silent and not lost.
    FAILOVER: from there to the next step, with the wait for another node where too few are left. SWITCH: to a planned
    generation. HEAL: copies of the state, unless a step goes on beside them. WAITING: all workers had stepped aside for
    an empty generation. STANDBY: the job needed this worker not. CHECKPOINT: what writing one took of this thread.
    """

    START = "start"
    STEP = "step"
    FAILED_STEP = "failed_step"
    HANG = "hang"
    FAILOVER = "failover"
    SWITCH = "switch"
    HEAL = "heal"
    WAITING = "waiting"
    STANDBY = "standby"
    CHECKPOINT = "checkpoint"


# What a change of membership costs a worker that trained before it.
LOST_TO_CHANGES = (
    TimeUse.FAILED_STEP, TimeUse.HANG, TimeUse.FAILOVER, TimeUse.SWITCH, TimeUse.HEAL, TimeUse.WAITING,
)  # fmt: skip


def goodput_of(spent_s: Mapping[str, float]) -> float | None:
    """Returns the share of STEP in a worker's time since its first generation, without STANDBY.

    None before there is any such time. spent_s: by the names of uses; those of a newer version count as lost.
    """
    aside = (TimeUse.START.value, TimeUse.STANDBY.value)
    total_s = sum(seconds for use, seconds in spent_s.items() if use not in aside)
    return spent_s.get(TimeUse.STEP.value, 0.0) / total_s if total_s > 0 else None
