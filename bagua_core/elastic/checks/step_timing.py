"""Detects waits that are longer than usual, and measures the job's speed and its usual step.

Arithmetic over durations; no clock.
"""

from __future__ import annotations

from collections import deque

LEAST_STALL_S = 0.25  # below it a report is noise: a scheduler's hiccup, a page cache flush
# who waits longer than that without a word counts as being outside the step's collectives
MOST_STALL_S = 20.0
USUAL_FACTOR = 3.0
REPORT_AGAIN_FACTOR = 2.0  # each further report of one wait comes after twice the time
SMOOTHING = 0.2
USUAL_OF_STEPS = 5  # the newest ones, of whose times the usual step is the median
# A wait for bytes of the state that keep arriving is reported as a new wait so often: well below the time after which a
# generation in which all members wait is made again.
MOVING_REPORT_S = 1.0
MOST_MOVING_REPORTS_PER_S = 200.0  # of the whole job: the leader handles each


class WaitMonitor:
    """Learns how long waits usually last and says when one is worth a report (probing is cheap, so early)."""

    def __init__(self) -> None:
        self._usual_s: float | None = None
        self.threshold_s = LEAST_STALL_S
        """The duration from which a wait is longer than usual."""
        self._next_report_s = 0.0

    def begin(self) -> None:
        self._next_report_s = self.threshold_s

    def is_stalled(self, waited_s: float) -> bool:
        """Tells whether a wait is due for a report.

        That is so at most once per threshold, with the time to the next report doubling.
        """
        if waited_s < self._next_report_s:
            return False
        self._next_report_s = max(waited_s, self._next_report_s) * REPORT_AGAIN_FACTOR
        return True

    def ended(self, waited_s: float) -> None:
        if self._usual_s is None:
            self._usual_s = waited_s
        else:
            self._usual_s += SMOOTHING * (waited_s - self._usual_s)
        self.threshold_s = min(MOST_STALL_S, max(LEAST_STALL_S, USUAL_FACTOR * self._usual_s))


class UsualStep:
    """Measures how long a step usually takes, from its boundary to its commit.

    Time between two steps does not count: changes of membership, waits for nodes, an evaluation between epochs. A
    checkpoint or an evaluation within a step makes that step unusual, hence the median. The first step of a process
    builds kernels and connections, and is left out.
    """

    def __init__(self) -> None:
        self._newest_s: deque[float] | None = None  # None before the first step

    def step_done(self, step_s: float) -> None:
        if self._newest_s is None:
            self._newest_s = deque(maxlen=USUAL_OF_STEPS)
        else:
            self._newest_s.append(step_s)

    @property
    def seconds(self) -> float:
        """The usual duration of a step in seconds; 0 if unknown."""
        newest = self._newest_s
        return sorted(newest)[(len(newest) - 1) // 2] if newest else 0.0


class Pace:
    """Counts steps per second between two reports, pauses between steps included."""

    def __init__(self, report_every_s: float) -> None:
        self._every_s = report_every_s
        self._since_s: float | None = None
        self._steps = 0
        self.steps_per_s = 0.0

    def step_done(self, now_s: float) -> bool:
        """Counts one step. Returns True when it is time to report."""
        if self._since_s is None:
            self._since_s = now_s
            return True
        self._steps += 1
        elapsed_s = now_s - self._since_s
        if elapsed_s < self._every_s:
            return False
        self.steps_per_s = self._steps / elapsed_s
        self._since_s, self._steps = now_s, 0
        return True


def moving_report_s(members: int) -> float:
    """Returns the time from one report of a wait for arriving bytes to the next, in a generation of so many members."""
    return min(MOST_STALL_S, max(MOVING_REPORT_S, members / MOST_MOVING_REPORTS_PER_S))
