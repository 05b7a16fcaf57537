"""Accounts for the time of the script's thread: seconds by use, and a histogram of the times of committed steps.

Arithmetic over times that the caller measures; no clock. The engine closes a lap wherever the use of its time changes.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass

from bagua_contract.records import Generation, GenerationKind
from bagua_contract.time_use import LOST_TO_CHANGES, STEP_TIME_BOUNDS_S, TimeUse

# twice the recovery from a host that vanishes; a cut link is acted on from here on (hang_cut_s)
HANG_FROM_S = 2.0


def use_of_entry(aside: TimeUse | None, entered: Generation) -> TimeUse:
    """Returns the use of the time between two steps that ended in `entered`.

    aside: why the worker had no generation meanwhile (START, WAITING or STANDBY); None if it had one all the time.
    """
    if aside is not None:
        return aside
    return TimeUse.FAILOVER if entered.kind is GenerationKind.FAILOVER else TimeUse.SWITCH


@dataclass(frozen=True, slots=True)
class FailedWait:
    """A wait in a collective that ended with a failure. threshold_s: from there on it is longer than usual."""

    waited_s: float = 0.0
    threshold_s: float = 0.0


def use_of_failed_wait(wait: FailedWait) -> tuple[TimeUse, str]:
    """Returns the use of the last wait of a step that was rolled back, and why.

    The length of the wait decides. A process that ends closes its connections, and a host that vanishes is noticed
    within a second by probes, so a longer silence is that of a peer that lives: hung, stopped, or cut off.
    """
    least_s = max(HANG_FROM_S, wait.threshold_s)
    if wait.waited_s < least_s:
        return (
            TimeUse.FAILED_STEP,
            f"the failure ended its wait of {wait.waited_s:.1f} s within {least_s:.1f} s",
        )
    return TimeUse.HANG, f"it waited {wait.waited_s:.1f} s for a silent peer, {least_s:.1f} s or more: a hang"


class TimeAccount:
    """Sums the time by use. Sums of `seconds` are the time from `now_s` at the start to the last lap."""

    def __init__(self, now_s: float) -> None:
        self._since_s = now_s
        self.seconds: dict[TimeUse, float] = {}
        self.step_counts = [0] * (len(STEP_TIME_BOUNDS_S) + 1)
        self.step_sum_s = 0.0
        self._lost_before: dict[TimeUse, float] = {}
        self.computing_s = 0.0  # of step_sum_s, without waits for other workers

    def lap(self, use: TimeUse, now_s: float) -> None:
        """Counts all time since the last lap for `use`."""
        self._add(use, now_s - self._since_s)
        self._since_s = now_s

    def part(self, use: TimeUse, seconds: float) -> None:
        """Counts so much of the lap under way for `use`; the rest is for what `lap` will say."""
        self._add(use, seconds)
        self._since_s += seconds

    def step(self, step_s: float, waited_s: float = 0.0) -> None:
        """Counts a committed step that took step_s, of which it waited for others for waited_s."""
        self.step_counts[bisect.bisect_left(STEP_TIME_BOUNDS_S, step_s)] += 1
        self.step_sum_s += step_s
        self.computing_s += max(0.0, step_s - waited_s)

    def take_lost(self) -> dict[str, float]:
        """Returns the seconds that changes of membership took since the last call, by use; uses without any are left
        out."""
        lost = {use: self.seconds.get(use, 0.0) for use in LOST_TO_CHANGES}
        before, self._lost_before = self._lost_before, lost
        since = {use.value: seconds - before.get(use, 0.0) for use, seconds in lost.items()}
        return {use: seconds for use, seconds in since.items() if seconds > 0}

    def _add(self, use: TimeUse, seconds: float) -> None:
        self.seconds[use] = self.seconds.get(use, 0.0) + max(0.0, seconds)
