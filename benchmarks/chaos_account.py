"""Computes the cost of faults from the times of committed steps and of events. Pure arithmetic.

Definitions, also printed with the result:
- goodput: of the time from the first step of all nodes to the last event's end, the share that was useful: for each
  committed step the shorter of its gap to the step before it and the usual gap, the median at this world size.
- recovery: from an event to the first committed step of a later generation with fewer workers, before the next
  event. There is none if no worker had to be left out: a short freeze, etcd's absence. Of a leave: of any later
  generation, for a worker may join with it. Of a join: to the joiner's first committed step.
- pause: the longest gap between two committed steps that ended between an event and the next, less the usual gap.
"""

from __future__ import annotations

import math
import statistics
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from benchmarks.committed_steps import Committed

TWO_AT_ONCE = "two at once"


@dataclass(frozen=True, slots=True)
class Happened:
    """An event that was acted out. until_s: when the next one began, or the last one's mending was over. joined_s: of
    a join, the newcomer's first committed step, if it came to one."""

    kind: str
    begin_s: float
    until_s: float
    at_once: bool = False
    is_leave: bool = False
    is_join: bool = False
    joined_s: float | None = None


@dataclass(frozen=True, slots=True)
class Cost:
    """Of one event; recovery_s None: there was none, see above."""

    kind: str
    recovery_s: float | None
    pause_s: float


def usual_gaps_s(steps: Sequence[Committed]) -> dict[int, float]:
    """The median gap between two steps in a row of one generation, by world size."""
    gaps: dict[int, list[float]] = {}
    for before, after in pairwise(steps):
        if before.generation == after.generation and after.step == before.step + 1:
            gaps.setdefault(after.world_size, []).append(after.time_s - before.time_s)
    return {size: statistics.median(found) for size, found in gaps.items()}


def goodput(steps: Sequence[Committed], begin_s: float, end_s: float) -> float:
    """The useful share of the span. steps: in order."""
    usual = usual_gaps_s(steps)
    useful_s = 0.0
    for before, after in pairwise(steps):
        if before.time_s >= begin_s and after.time_s <= end_s:
            gap_s = max(0.0, after.time_s - before.time_s)
            useful_s += min(gap_s, usual.get(after.world_size, gap_s))
    return useful_s / (end_s - begin_s) if end_s > begin_s else 0.0


def costs(steps: Sequence[Committed], events: Sequence[Happened]) -> list[Cost]:
    """Costs of each event, in order. Overlapping events count as TWO_AT_ONCE, without a recovery."""
    usual = usual_gaps_s(steps)
    times = [s.time_s for s in steps]
    found = []
    for number, event in enumerate(events):
        together = 0  # events that came before this one was mended
        while number + together + 1 < len(events) and events[number + together + 1].at_once:
            together += 1
        overlaps = event.at_once or together > 0
        first = bisect_right(times, event.begin_s)
        beyond = bisect_right(times, events[number + together].until_s)
        before_it = steps[first - 1] if first else None
        recovery_s: float | None
        if overlaps:
            recovery_s = None
        elif event.is_join:
            recovery_s = None if event.joined_s is None else event.joined_s - event.begin_s
        else:
            after = (s for s in steps[first:beyond] if before_it and _follows(s, before_it, event.is_leave))
            recovery_s = next((s.time_s - event.begin_s for s in after), None)
        pauses = [
            later.time_s - earlier.time_s - usual.get(later.world_size, 0.0)
            for earlier, later in pairwise(steps[max(0, first - 1) : beyond])
        ]
        kind = TWO_AT_ONCE if overlaps else event.kind
        found.append(Cost(kind, recovery_s, max(0.0, max(pauses, default=0.0))))
    return found


def _follows(step: Committed, before: Committed, any_size: bool) -> bool:
    return step.generation > before.generation and (any_size or step.world_size < before.world_size)


def percentile(values: Sequence[float], share: float) -> float:
    """The least of `values` that so large a share of them does not exceed. Raises ValueError without any."""
    if not values:
        raise ValueError("no values")
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def by_kind(found: Sequence[Cost]) -> Mapping[str, list[Cost]]:
    kinds: dict[str, list[Cost]] = {}
    for cost in found:
        kinds.setdefault(cost.kind, []).append(cost)
    return kinds
