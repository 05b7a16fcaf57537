"""Keeps account of the cluster's queue while this daemon schedules, for its metrics.

The scheduler's thread tells of each decision and outcome; any thread takes a picture. Without IO; times are arguments.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import Counter

from bagua_agent.cluster.cluster_plan import JobState, Plan
from bagua_agent.cluster.cluster_view import ClusterView, JobEnd
from bagua_agent.cluster.node_state import NodeState, slot_uses, state_of, taken_slots
from bagua_agent.metrics.daemon_picture import WAIT_BOUNDS_S, QueuePicture

_SHOWN = (JobState.QUEUED, JobState.STARTING, JobState.RUNNING, JobState.STOPPING)


class QueueAccount:
    """From an election on: `begin`, then `decided` and `ended` until another `begin`. Counters only grow."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._view: ClusterView | None = None
        self._states: dict[str, JobState] = {}
        self._submitted: dict[str, tuple[str, float]] = {}  # by job: the submission's nonce, and its time
        self._ended: Counter[JobEnd] = Counter()
        self._waits = [0] * (len(WAIT_BOUNDS_S) + 1)
        self._wait_sum_s = 0.0

    def begin(self) -> None:
        """This daemon schedules no more, or has just been elected: what it knew of jobs may be old."""
        with self._lock:
            self._view, self._states = None, {}

    def decided(self, view: ClusterView, made: Plan, now_unix_s: float) -> None:
        """A plan was made of this view, and written. A job that waited before it, and has nodes, has started."""
        with self._lock:
            for job in view.submissions:
                known, place = self._states.get(job.job_id), made.jobs.get(job.job_id)
                waited = known is JobState.QUEUED or (known is None and self._view is not None)
                if waited and place is not None and place.state in (JobState.STARTING, JobState.RUNNING):
                    self._count_wait(max(0.0, now_unix_s - job.submitted_unix_s))
            self._view = view
            self._states = {
                j.job_id: made.jobs[j.job_id].state for j in view.submissions if j.job_id in made.jobs
            }

    def ended(self, end: JobEnd) -> None:
        with self._lock:
            self._ended[end] += 1

    def picture(self, now_unix_s: float) -> QueuePicture | None:
        """None while this daemon does not schedule."""
        with self._lock:
            if self._view is None:
                return None
            states = Counter(self._states.values())
            nodes = [(state_of(n), n.slots, taken_slots(n)) for n in self._view.nodes.values()]
            of_nodes = Counter(state for state, _, _ in nodes)
            waits = [
                now_unix_s - job.submitted_unix_s
                for job in self._view.submissions
                if self._states.get(job.job_id) is JobState.QUEUED
            ]
            return QueuePicture(
                jobs={state.value: states[state] for state in _SHOWN},
                ended={end.name.lower(): self._ended[end] for end in JobEnd},
                nodes={state.value: of_nodes[state] for state in NodeState},
                slots={use.value: slots for use, slots in slot_uses(nodes).items()},
                oldest_wait_s=max(0.0, *waits, 0.0),
                waits=tuple(self._waits),
                wait_sum_s=self._wait_sum_s,
            )

    def _count_wait(self, wait_s: float) -> None:
        self._waits[bisect_left(WAIT_BOUNDS_S, wait_s)] += 1
        self._wait_sum_s += wait_s
