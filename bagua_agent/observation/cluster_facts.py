"""Collects everything about a cluster at one moment, for its page: nodes, jobs, the queue, and what can be expected of
it.

`ClusterWatch` is the thin shell: one read of etcd, and one call to an agent of each running job. `ClusterFacts` is a
value; what it means is decided elsewhere, by pure functions.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from bagua_agent.cluster.cluster_plan import JobState
from bagua_agent.cluster.cluster_policy import ClusterPolicy
from bagua_agent.cluster.expected_start import expected_starts
from bagua_agent.etcd.client import KeyValue, Store
from bagua_agent.etcd.keys import JOBS_PREFIX, JobKeys
from bagua_agent.observation.cluster_status import ClusterReader, ClusterStatus, JobStatus
from bagua_agent.observation.first_seen import FirstSeen
from bagua_agent.observation.job_paces import JobPace, JobPaces
from bagua_agent.observation.jobs_by_hand import jobs_by_hand

_GOES_ON = (JobState.STARTING.value, JobState.RUNNING.value, JobState.STOPPING.value)


@dataclass(frozen=True, slots=True)
class ClusterFacts:
    """The facts about a cluster at one moment. at_unix_s: of the reader's clock, for people. by_hand: jobs without a
    submission. paces: of jobs whose agent answered. starts_in_s: until waiting jobs start, where it can be predicted.
    ends_unix_s: by the reader's clock, of jobs that have ended, by job id."""

    at_unix_s: float
    status: ClusterStatus
    by_hand: tuple[JobStatus, ...] = ()
    paces: Mapping[str, JobPace] = field(default_factory=dict)
    starts_in_s: Mapping[str, float] = field(default_factory=dict)
    ends_unix_s: Mapping[str, float] = field(default_factory=dict)

    @property
    def jobs(self) -> tuple[JobStatus, ...]:
        return (*self.status.jobs, *self.by_hand)

    @property
    def going(self) -> list[JobStatus]:
        """The jobs that have nodes, or are about to."""
        return [job for job in self.jobs if job.state in _GOES_ON]

    @property
    def queue(self) -> list[JobStatus]:
        """The jobs that wait, in the order in which they are considered."""
        return sorted((job for job in self.status.jobs if job.position), key=lambda job: job.position)


class ClusterWatch:
    """Reads the facts about a cluster again and again. For one thread; `close` ends its connections. complain: called
    with each record that can't be read."""

    def __init__(self, store: Store, complain: Callable[[str], object]) -> None:
        self._reader = ClusterReader(store, complain)
        self._paces = JobPaces(store)
        self._ends: FirstSeen[tuple[str, float]] = FirstSeen()  # job id, and the end in its record

    def look(self, clock_unix_s: Callable[[], float] = time.time) -> ClusterFacts:
        """Returns the facts about the cluster now. Raises StoreUnavailable."""
        seen = self._reader.look()
        of_jobs = [kv for key, kv in seen.values.items() if key.startswith(JOBS_PREFIX)]
        by_hand = jobs_by_hand(of_jobs, {job.job_id for job in seen.status.jobs})
        facts = ClusterFacts(clock_unix_s(), seen.status, by_hand)
        agents: dict[str, list[KeyValue]] = defaultdict(list)
        going = {job.job_id for job in facts.going}
        for kv in of_jobs:
            job_id = JobKeys.job_in(kv.key)
            if job_id in going and kv.key.startswith(JobKeys(job_id).agents):
                agents[job_id].append(kv)
        paces = self._paces.look(agents)
        ends = {job_id: left for job_id, pace in paces.items() if (left := pace.left_s) is not None}
        waits = any(job.fits for job in facts.queue)
        starts = expected_starts(seen.view, seen.now_s, ClusterPolicy(), ends) if waits and ends else {}
        return ClusterFacts(facts.at_unix_s, seen.status, by_hand, paces, starts, self._ended(facts))

    def _ended(self, facts: ClusterFacts) -> dict[str, float]:
        ended = [job for job in facts.status.jobs if job.exit_code is not None]
        self._ends.take({(job.job_id, job.ended_unix_s): job.ended_unix_s for job in ended}, facts.at_unix_s)
        return {job.job_id: self._ends.unix_s((job.job_id, job.ended_unix_s)) for job in ended}

    def close(self) -> None:
        self._paces.close()
