"""Defines the verdict's form, and the words that several of its rules use. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from bagua_agent.base.plain_text import counted
from bagua_agent.observation.job_facts import JobFacts
from bagua_agent.observation.series import JobSeries

STANDSTILL_S = 5.0  # a shorter wait is no news: a checkpoint, a new generation, a busy host
STANDSTILL_STEPS = 3.0  # times the usual step
MOST_NAMES = 4


class Level(Enum):
    GOOD = "good"
    WAITING = "waiting"  # nothing is wrong, and nothing is trained
    WARNING = "warning"  # it trains, and something wants a person's attention
    BAD = "bad"  # it does not train


@dataclass(frozen=True, slots=True)
class Verdict:
    """The verdict about a job. what: happens. why: as far as it is known. next: what a person can do. Each is one
    sentence, or empty."""

    level: Level
    what: str
    why: str
    next: str


def trains(facts: JobFacts, series: JobSeries) -> str:
    """Returns a sentence about the job's size and speed, without a full stop."""
    generation = facts.generation
    size = 0 if generation is None else generation.world_size
    nodes = 0 if generation is None else generation.node_count
    rate = series.recent_rate()
    pace = f" at {rate:.3g} steps/s" if rate else ""
    return f"The job trains with {counted(size, 'worker')} on {counted(nodes, 'node')}{pace}"


def without_step_s(facts: JobFacts, series: JobSeries) -> float:
    """Returns the time since the newest step was first seen; 0 before the first one, and when the last one is done."""
    return facts.at_unix_s - series.step_since_unix_s if series.step and not facts.closing else 0.0


def standstill_s(series: JobSeries) -> float:
    """Returns how long a wait has to last before it is shown."""
    return max(STANDSTILL_S, STANDSTILL_STEPS * series.usual_step_s())


def stands_still(facts: JobFacts, series: JobSeries) -> bool:
    return without_step_s(facts, series) >= standstill_s(series)
