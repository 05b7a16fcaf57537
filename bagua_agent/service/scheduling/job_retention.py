"""Removes jobs beyond retention, submitted or started by hand, old removals, empty orders of nodes that are gone and
etcd's old history, for the scheduler.

cluster/retention.py decides which ones. Every write compares the scheduler's key, and the submission as it was read.
Works in small parts, so that orders never wait long.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TypeVar

from bagua_agent.base.errors import OutcomeUnknown, StoreFull
from bagua_agent.cluster.cluster_policy import ClusterPolicy
from bagua_agent.cluster.cluster_records import UnreadableRecord, ended_submission, nonce_of, parse_submission
from bagua_agent.cluster.node_trouble import settled_at_s
from bagua_agent.cluster.retention import (
    EndedJob,
    HistoryKept,
    UnusedOrders,
    beyond_retention,
    expired_removals,
)
from bagua_agent.cluster_state.cluster_picture import ClusterPicture
from bagua_agent.cluster_state.job_removal import remove_job
from bagua_agent.etcd import cluster_keys
from bagua_agent.etcd.client import Compare, KeyValue, Store, absent, mod_revision_is, none_below
from bagua_agent.etcd.keys import JOBS_PREFIX, RECORDS_PREFIX, JobKeys
from bagua_agent.etcd.mirror import Mirror
from bagua_agent.history.job_history import ENDED, read_event

log = logging.getLogger(__name__)

T = TypeVar("T")

MOST_AT_ONCE = 50  # jobs or removals; the others follow at the next pass
PASS_AGAIN_S = 1.0  # when there were more, or a removal was overtaken


def ended_by_hand(standing: Mapping[str, KeyValue]) -> list[EndedJob]:
    """Returns the jobs, of all keys, that have a result and no agent, and that no submission or outcome names. Pure."""
    found = []
    with_agents = {JobKeys.job_in(key) for key in standing if key.split("/")[5:6] == ["agents"]}
    for key in standing:
        job_id = JobKeys.job_in(key)
        if job_id is None or job_id in with_agents or key != JobKeys(job_id).result:
            continue
        if not {cluster_keys.submission(job_id), cluster_keys.outcome(job_id)}.isdisjoint(standing):
            continue
        told = standing.get(JobKeys(job_id).event(ENDED))
        event = None if told is None else read_event(ENDED, told.value)
        ended_unix_s = 0.0 if event is None or not math.isfinite(event.time_unix_s) else event.time_unix_s
        found.append(EndedJob(job_id, "", ended_unix_s))
    return found


class JobRetention:
    """Removes what is beyond retention, for one scheduler. fence: that it still is the scheduler. mirror: of all keys,
    the source of `picture`. progress: called before each of many writes."""

    def __init__(
        self,
        store: Store,
        picture: ClusterPicture,
        mirror: Mirror,
        fence: Compare,
        policy: ClusterPolicy,
        say: Callable[[str], None],
        progress: Callable[[], object],
        clock_unix_s: Callable[[], float] = time.time,
    ) -> None:
        self._store = store
        self._picture = picture
        self._mirror = mirror
        self._fence = fence
        self._policy = policy
        self._say = say
        self._progress = progress
        self._clock_unix_s = clock_unix_s
        self._history = HistoryKept(policy)
        self._unused_orders = UnusedOrders(policy)
        self._pass_due_s = settled_at_s(picture.since_s, policy)
        self._compact_due_s = 0.0

    @property
    def due_s(self) -> float:
        """The time at which `tidy` should be called again, if nothing changes until then."""
        return min(self._pass_due_s, self._compact_due_s)

    def tidy(self, now_s: float) -> None:
        """Does what is due. Raises InfrastructureLost, UserError."""
        try:
            # first: an etcd without room, which refuses the removals below, takes it
            if now_s >= self._compact_due_s:
                self._compact_due_s = now_s + self._policy.compact_every_s
                self._compact(now_s)
            if self._picture.put_back_jobs():
                self._remove_again()
            if now_s >= self._pass_due_s:
                is_done = self._pass() and self._pass_started_by_hand()
                self._remove_unused_orders(now_s)
                self._pass_due_s = now_s + (self._policy.retention_every_s if is_done else PASS_AGAIN_S)
        except OutcomeUnknown as error:
            log.info("scheduler: %s", error)
            self._pass_due_s = now_s + PASS_AGAIN_S
        except StoreFull:
            # not the end of this scheduler: its successor would know no revision that is old enough to compact to
            self._pass_due_s = now_s + self._policy.retention_every_s

    def _each(self, parts: Iterable[T]) -> Iterator[T]:
        for part in parts:
            self._progress()
            yield part

    def _remove_again(self) -> None:
        """Removes jobs that were removed before. A daemon that had not heard of the removal put the submission back,
        before the removal itself was back."""
        for job in self._each(self._picture.put_back_jobs()[:MOST_AT_ONCE]):
            if self._remove(EndedJob(job.job_id, job.nonce, 0.0), may_go_on=True):
                self._say(f"job {job.job_id} was removed and had been put back, so it is removed again")

    def _pass(self) -> bool:
        """Removes jobs, removals and leftovers that are due, and returns whether all that was found is done."""
        now_unix_s = self._clock_unix_s()
        found = beyond_retention(self._picture.ended_jobs(), now_unix_s, self._policy)
        for each in self._each(found[:MOST_AT_ONCE]):
            if self._remove(each.job):
                self._say(f"job {each.job.job_id} is removed: {each.reason}")
        expired = expired_removals(self._picture.removals, now_unix_s, self._policy)
        for start in self._each(range(0, len(expired), MOST_AT_ONCE)):
            keys = [cluster_keys.removal(nonce) for nonce in expired[start : start + MOST_AT_ONCE]]
            self._store.transact([self._fence], deletes=keys)
        self._remove_leftovers(self._picture.view().removed)
        return len(found) <= MOST_AT_ONCE

    def _pass_started_by_hand(self) -> bool:
        """Removes jobs without a submission, by the same policy. Returns whether all that was found is done."""
        found = beyond_retention(ended_by_hand(self._mirror.state()), self._clock_unix_s(), self._policy)
        for each in self._each(found[:MOST_AT_ONCE]):
            job_id = each.job.job_id
            keys, result = JobKeys(job_id), self._store.get(JobKeys(job_id).result)
            if result is None:
                continue  # another one begins under its id
            unchanged = [
                self._fence,
                mod_revision_is(keys.result, result.mod_revision),
                absent(cluster_keys.submission(job_id)),
                absent(cluster_keys.outcome(job_id)),
            ]
            if remove_job(self._store, job_id, "", self._clock_unix_s(), *unchanged):
                self._say(f"job {job_id}, which was started by hand, is removed: {each.reason}")
        return len(found) <= MOST_AT_ONCE

    def _remove_unused_orders(self, now_s: float) -> None:
        """Removes empty orders of nodes that are gone. Measures by the clock of this process: no record says since when
        a node is gone."""
        expired = self._unused_orders.expired(self._picture.unused_orders(), now_s)
        for node_name, revision in self._each(expired[:MOST_AT_ONCE]):
            key = cluster_keys.orders(node_name)
            unused = [mod_revision_is(key, revision), absent(cluster_keys.node(node_name))]
            if self._store.transact([self._fence, *unused], deletes=[key]).succeeded:
                self._say(f"node {node_name} has not come back, so its empty orders are removed")

    def _remove(self, job: EndedJob, may_go_on: bool = False) -> bool:
        """Removes a job. Returns False if it differs from the picture, or if an agent of it is there. may_go_on: also
        without an outcome."""
        key, over = cluster_keys.submission(job.job_id), cluster_keys.outcome(job.job_id)
        found, outcome = self._store.get(key), self._store.get(over)
        if outcome is None and not may_go_on:
            return False
        unchanged = [self._fence]
        if outcome is not None:
            unchanged.append(mod_revision_is(over, outcome.mod_revision))
        if found is None:  # etcd lost it, and no daemon was there to put it back
            nonce = "" if outcome is None else ended_submission(outcome.value)
            unchanged.append(absent(key))
        else:
            try:
                nonce = nonce_of(parse_submission(found.value, job.job_id))
            except UnreadableRecord:
                return False
            unchanged.append(mod_revision_is(key, found.mod_revision))
        if job.nonce and nonce != job.nonce:
            return False
        return remove_job(self._store, job.job_id, nonce, self._clock_unix_s(), *unchanged)

    def _remove_leftovers(self, removed: Iterable[str]) -> None:
        """Removes what late agents and daemons wrote under the name of a removed job, where no other job has begun."""
        standing = self._mirror.state()
        with_keys = {key.split("/")[4] for key in standing if key.startswith((JOBS_PREFIX, RECORDS_PREFIX))}
        for job_id in self._each(sorted(with_keys.intersection(removed))):
            keys = JobKeys(job_id)
            if keys.spec in standing:
                continue
            unused = [absent(cluster_keys.submission(job_id)), absent(keys.spec), none_below(keys.agents)]
            self._store.transact([self._fence, *unused], delete_ranges=keys.ranges)

    def _compact(self, now_s: float) -> None:
        _, revision = self._store.get_prefix(cluster_keys.SCHEDULER)
        compact_to = self._history.compact_to(now_s, revision)
        if compact_to is not None:
            self._store.compact(compact_to)
