"""Keeps account of the cluster's queue while this daemon schedules, for its metrics.

The scheduler's thread tells of each decision and outcome; any thread takes a picture. Without IO; times are arguments.
"""

from __future__ import annotations

import math
import threading
from bisect import bisect_left
from collections import Counter

from bagua_agent.cluster.cluster_plan import JobState, Plan
from bagua_agent.cluster.cluster_view import ClusterView, JobEnd, SubmissionView
from bagua_agent.cluster.node_state import NodeState, slot_uses, state_of, taken_slots
from bagua_agent.metrics.daemon_picture import WAIT_BOUNDS_S, QueuePicture

_SHOWN = (JobState.QUEUED, JobState.STARTING, JobState.RUNNING, JobState.STOPPING)


class QueueAccount:
    """Counts the jobs of the queue, and how long they wait, from an election on: `begin`, then `decided` and `ended`
    until another `begin`. Counters only grow."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._view: ClusterView | None = None
        self._states: dict[str, JobState] = {}
        self._since: dict[str, float] = {}  # by job that waits
        self._ended: Counter[JobEnd] = Counter()
        self._waits = [0] * (len(WAIT_BOUNDS_S) + 1)
        self._wait_sum_s = 0.0

    def begin(self) -> None:
        """Forgets the jobs: this daemon schedules no more, or has just been elected, so what it knew of them may be
        old."""
        with self._lock:
            self._view, self._states, self._since = None, {}, {}

    def decided(self, view: ClusterView, made: Plan, now_unix_s: float) -> None:
        """Takes a plan that was made of this view, and written. A job that waited before it, and has nodes, has
        started."""
        with self._lock:
            for job in view.submissions:
                known, place = self._states.get(job.job_id), made.jobs.get(job.job_id)
                waited = known is JobState.QUEUED or (known is None and self._view is not None)
                if waited and place is not None and place.state in (JobState.STARTING, JobState.RUNNING):
                    self._count_wait(max(0.0, now_unix_s - self._waits_since(job)))
            self._since = {
                job.job_id: now_unix_s if self._had_nodes(job, view) else self._waits_since(job)
                for job in view.submissions
                if job.job_id in made.jobs and made.jobs[job.job_id].state is JobState.QUEUED
            }
            self._view = view
            self._states = {
                j.job_id: made.jobs[j.job_id].state for j in view.submissions if j.job_id in made.jobs
            }

    def ended(self, end: JobEnd) -> None:
        with self._lock:
            self._ended[end] += 1

    def picture(self, now_unix_s: float) -> QueuePicture | None:
        """Returns a picture of the queue; None while this daemon does not schedule."""
        with self._lock:
            if self._view is None:
                return None
            states = Counter(self._states.values())
            nodes = [(state_of(n), n.slots, taken_slots(n)) for n in self._view.nodes.values()]
            of_nodes = Counter(state for state, _, _ in nodes)
            waits = [now_unix_s - since_s for since_s in self._since.values()]
            return QueuePicture(
                jobs={state.value: states[state] for state in _SHOWN},
                ended={end.name.lower(): self._ended[end] for end in JobEnd},
                nodes={state.value: of_nodes[state] for state in NodeState},
                slots={use.value: slots for use, slots in slot_uses(nodes).items()},
                oldest_wait_s=max([0.0, *waits]),
                waits=tuple(self._waits),
                wait_sum_s=self._wait_sum_s,
            )

    def _waits_since(self, job: SubmissionView) -> float:
        """Returns when the wait of a job began. Another job of the name was submitted later than the wait of the one
        before began."""
        return max(job.submitted_unix_s, self._since.get(job.job_id, -math.inf))

    def _had_nodes(self, job: SubmissionView, view: ClusterView) -> bool:
        """Tells whether the job had nodes before this decision, which finds it without. After an election nothing says
        when it lost them."""
        if job.job_id in self._since:
            return False
        progress = view.progress.get(job.job_id)
        return job.job_id in self._states or (progress is not None and progress.begun)

    def _count_wait(self, wait_s: float) -> None:
        self._waits[bisect_left(WAIT_BOUNDS_S, wait_s)] += 1
        self._wait_sum_s += wait_s
