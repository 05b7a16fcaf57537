"""Builds the scheduler's picture from changed keys of the store. Sends no requests.

Also keeps what keys alone do not contain: since when, by this process's clock, a node is missing or a job is over, and
the last report of a missing node.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

from bagua_agent.cluster.cluster_records import (
    UnreadableRecord,
    read_drain,
    read_node,
    read_orders,
    read_outcome,
    read_progress,
    read_removal,
    read_submission,
    unreadable_outcome,
)
from bagua_agent.cluster.cluster_view import (
    ClusterView,
    DrainView,
    JobProgress,
    NodeView,
    OrderView,
    OutcomeView,
    RemovalView,
    SubmissionView,
)
from bagua_agent.cluster.retention import EndedJob
from bagua_agent.cluster_state.odd_records import OddRecords
from bagua_agent.etcd import cluster_keys
from bagua_agent.etcd.cluster_keys import id_in
from bagua_agent.etcd.keys import JOBS_PREFIX, JobKeys
from bagua_agent.etcd.mirror import Change


@dataclass(slots=True)
class _Job:
    """The keys of one job that matter here."""

    generation: bytes | None = None
    result: bytes | None = None
    result_since_s: float = 0.0
    agents: dict[str, bytes] = field(default_factory=dict)
    agents_gone: int = 0
    members: dict[str, bytes] = field(default_factory=dict)
    replicas: dict[str, bytes] = field(default_factory=dict)

    @property
    def is_empty(self) -> bool:
        told = (self.generation, self.result)
        return told == (None, None) and not (self.agents or self.members or self.replicas)


class ClusterPicture:
    """The scheduler's picture of the cluster. complain: called once for each record that can't be read."""

    def __init__(self, since_s: float, complain: Callable[[str], object]) -> None:
        self.since_s = since_s
        self._odd = OddRecords(complain)
        self._nodes: dict[str, NodeView] = {}
        self._drains: dict[str, DrainView] = {}
        self._submissions: dict[str, tuple[int, SubmissionView]] = {}
        self._orders: dict[str, tuple[OrderView, ...]] = {}
        self._order_revisions: dict[str, int] = {}
        self._outcomes: dict[str, OutcomeView] = {}
        self._jobs: dict[str, _Job] = {}
        self._removals: dict[str, RemovalView] = {}
        self._newest_revision = 0
        self.scheduler_revision: int | None = None
        # etcd: since this picture began it has told of a revision before the newest one
        self.was_set_back = False

    def order_revision(self, node_name: str) -> int:
        """Returns the mod revision of a node's orders as read; 0: there is no key."""
        return self._order_revisions.get(node_name, 0)

    def took_order(self, node_name: str, orders: tuple[OrderView, ...], revision: int) -> None:
        """Takes orders that we wrote ourselves: the picture need not wait for their echo."""
        self._orders[node_name] = orders
        self._order_revisions[node_name] = revision

    def took_outcome(self, job_id: str, outcome: OutcomeView) -> None:
        self._outcomes[job_id] = outcome

    def left_jobs(self) -> frozenset[tuple[str, int]]:
        """Returns the jobs that have ended and have no agent, with the number of agents that were seen to go. An agent
        that came and went between two looks changes that number."""
        gone = {job_id: 0 for job_id in self._outcomes}
        gone |= {j: job.agents_gone for j, job in self._jobs.items() if j in gone}
        return frozenset(
            (j, number) for j, number in gone.items() if j not in self._jobs or not self._jobs[j].agents
        )

    @property
    def removals(self) -> Mapping[str, RemovalView]:
        """The removals, by the nonce of the submission that was removed."""
        return self._removals

    def put_back_jobs(self) -> list[SubmissionView]:
        """Returns the submissions that exist though they were removed: a daemon put them back before it knew."""
        return [job for _, job in self._submissions.values() if job.nonce in self._removals]

    def ended_jobs(self) -> list[EndedJob]:
        """Returns the jobs with an outcome that have no order and no unit left."""
        busy = {order.job_id for orders in self._orders.values() for order in orders}
        busy |= {u.job_id for node in self._nodes.values() for u in node.units if u.alive}
        nonces = {job_id: job.nonce for job_id, (_, job) in self._submissions.items()}
        return [
            EndedJob(job_id, nonces.get(job_id, ""), outcome.ended_unix_s)
            for job_id, outcome in self._outcomes.items()
            if job_id not in busy
        ]

    def unused_orders(self) -> list[tuple[str, int]]:
        """Returns the nodes that are gone and whose orders are empty, with the revision of these."""
        return [
            (name, self.order_revision(name))
            for name, orders in self._orders.items()
            if not orders and not (name in self._nodes and self._nodes[name].present)
        ]

    def view(self) -> ClusterView:
        nodes = {name: replace(node, drain=self._drains.get(name)) for name, node in self._nodes.items()}
        standing = [pair for pair in self._submissions.values() if pair[1].nonce not in self._removals]
        submissions = sorted(standing, key=lambda pair: (pair[0], pair[1].job_id))
        progress: dict[str, JobProgress] = {}
        for job_id in (submission.job_id for _, submission in submissions):
            job = self._jobs.get(job_id)
            if job is not None:
                with self._odd.passing_over(JobKeys(job_id).prefix, "how far it is counts as unknown"):
                    progress[job_id] = read_progress(
                        job.generation,
                        job.result,
                        job.agents,
                        job.members,
                        job.replicas.values(),
                        job.result_since_s,
                    )
        return ClusterView(
            nodes,
            tuple(s for _, s in submissions),
            dict(self._orders),
            progress,
            dict(self._outcomes),
            self.since_s,
            frozenset(r.job_id for r in self._removals.values()) - {s.job_id for _, s in submissions},
        )

    def take(self, changes: Iterable[Change], now_s: float) -> bool:
        """Takes changes, and returns whether any of them matters to decisions."""
        matters = False
        # of earlier calls: a batch may list removals, which have the revision of the read, before older writes
        newest_before = self._newest_revision
        for change in changes:
            self.was_set_back |= change.mod_revision < newest_before
            self._newest_revision = max(self._newest_revision, change.mod_revision)
            decides = True  # also a record that can't be read: what it replaced counts no more
            with self._odd.passing_over(change.key):
                decides = self._take(change, now_s)
            matters |= decides
        return matters

    def _take(self, change: Change, now_s: float) -> bool:
        key = change.key
        if key == cluster_keys.SCHEDULER:
            self.scheduler_revision = None if change.value is None else change.create_revision
            return True
        if key.startswith(JOBS_PREFIX):
            return self._take_job(change, now_s)
        for folder, take in (
            (cluster_keys.NODES, self._take_node),
            (cluster_keys.SUBMISSIONS, self._take_submission),
            (cluster_keys.ORDERS, self._take_orders),
            (cluster_keys.OUTCOMES, self._take_outcome),
            (cluster_keys.DRAINS, self._take_drain),
            (cluster_keys.REMOVALS, self._take_removal),
        ):
            if key.startswith(folder):
                name = id_in(folder, key)
                if name is None:
                    return _odd_key(change)
                take(name, change, now_s)
                return True
        return False

    def _take_node(self, name: str, change: Change, now_s: float) -> None:
        # An unreadable record counts as none: it need not be the daemon's, nor end with its lease. A daemon that
        # lives writes its own over it.
        known = self._nodes.get(name)
        if known is not None and known.present:
            self._nodes[name] = replace(known, present=False, absent_since_s=now_s)
        if change.value is not None:
            self._nodes[name] = read_node(change.value, name)

    def forget_node(self, name: str) -> None:
        """Forgets a node that is lost and has no orders: it need not be remembered."""
        self._nodes.pop(name, None)

    def _take_submission(self, name: str, change: Change, now_s: float) -> None:
        if change.value is None:
            self._submissions.pop(name, None)
            return
        self._submissions[name] = (change.create_revision, read_submission(change.value, name))

    def _take_orders(self, name: str, change: Change, now_s: float) -> None:
        self._orders.pop(name, None)
        self._order_revisions.pop(name, None)
        if change.value is not None:
            self._order_revisions[name] = change.mod_revision
            self._orders[name] = read_orders(change.value)

    def _take_outcome(self, name: str, change: Change, now_s: float) -> None:
        if change.value is None:
            self._outcomes.pop(name, None)
            self._forget_job(name)
        else:
            known = self._outcomes.get(name)
            since_s = known.since_s if known else now_s
            self._outcomes[name] = unreadable_outcome(since_s)  # unless it is read
            self._outcomes[name] = read_outcome(change.value, since_s)

    def _take_drain(self, name: str, change: Change, now_s: float) -> None:
        self._drains.pop(name, None)
        if change.value is not None:
            self._drains[name] = read_drain(change.value)

    def _take_removal(self, name: str, change: Change, now_s: float) -> None:
        self._removals.pop(name, None)
        if change.value is not None:
            self._removals[name] = read_removal(change.value)

    def _take_job(self, change: Change, now_s: float) -> bool:
        job_id = JobKeys.job_in(change.key)
        if job_id is None:
            return _odd_key(change)
        keys = JobKeys(job_id)
        job = self._jobs.get(job_id) or _Job()
        if change.key == keys.generation:
            job.generation = change.value
        elif change.key == keys.result:
            if job.result is None:
                job.result_since_s = now_s
            job.result = change.value
        elif (agent_id := id_in(keys.agents, change.key)) is not None:
            if change.value is None:
                job.agents.pop(agent_id, None)
                job.agents_gone += 1
            else:
                job.agents[agent_id] = change.value
        elif (worker_id := id_in(keys.members, change.key)) is not None:
            if change.value is None:
                job.members.pop(worker_id, None)
            else:
                job.members[worker_id] = change.value
        elif (replica_id := id_in(keys.replicas, change.key)) is not None:
            if change.value is None:
                job.replicas.pop(replica_id, None)
            else:
                job.replicas[replica_id] = change.value
        else:
            return False
        self._jobs[job_id] = job
        if change.value is None:
            self._forget_job(job_id)
        return job_id in self._submissions

    def _forget_job(self, job_id: str) -> None:
        """Forgets a job if it has no key left that matters here: jobs come and go for as long as this daemon
        schedules."""
        job = self._jobs.get(job_id)
        if job is not None and job.is_empty and job_id not in self._outcomes:
            del self._jobs[job_id]


def _odd_key(change: Change) -> bool:
    """Tells whether a key has a name that no job or node can have: no part of this protocol wrote it."""
    if change.value is not None:
        raise UnreadableRecord("no job or node can have this name")
    return False
