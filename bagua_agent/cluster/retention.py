"""Decides which ended jobs are removed, which removals and empty orders have stood long enough, and how far etcd is
compacted. Pure.

Times of jobs and removals are from the machines' wall clocks, since they outlive every daemon: a clock that is wrong by
days removes jobs too early or too late by as much.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from bagua_agent.cluster.cluster_policy import DAY_S, ClusterPolicy
from bagua_agent.cluster.cluster_view import RemovalView


@dataclass(frozen=True, slots=True)
class EndedJob:
    """A submitted job that is over. nonce: of its submission; empty if only its outcome is left. ended_unix_s: 0 if the
    outcome does not say."""

    job_id: str
    nonce: str
    ended_unix_s: float


@dataclass(frozen=True, slots=True)
class RemoveJob:
    job: EndedJob
    reason: str


def beyond_retention(jobs: Iterable[EndedJob], now_unix_s: float, policy: ClusterPolicy) -> list[RemoveJob]:
    """Returns the jobs to be removed, the longest ended first."""
    newest_first = sorted(jobs, key=lambda job: (-job.ended_unix_s, job.job_id))
    found = []
    for place, job in enumerate(newest_first):
        if place >= policy.ended_kept_jobs:
            found.append(RemoveJob(job, f"{policy.ended_kept_jobs} jobs have ended since"))
        elif job.ended_unix_s and now_unix_s - job.ended_unix_s > policy.ended_kept_s:
            found.append(RemoveJob(job, f"it ended more than {policy.ended_kept_s / DAY_S:g} days ago"))
    return found[::-1]


def expired_removals(
    removals: Mapping[str, RemovalView], now_unix_s: float, policy: ClusterPolicy
) -> list[str]:
    """Returns the nonces whose removals are old enough to be deleted."""
    return sorted(
        nonce for nonce, r in removals.items() if now_unix_s - r.removed_unix_s > policy.removal_kept_s
    )


def is_worth_putting_back(removal: RemovalView, now_unix_s: float, policy: ClusterPolicy) -> bool:
    """Tells whether a removal that is gone was lost with the store's keys; else it was removed at the end of its
    time."""
    return now_unix_s - removal.removed_unix_s <= policy.put_back_within_s


class UnusedOrders:
    """Remembers since when nodes are gone whose orders are empty, to remove those of nodes that do not come back."""

    def __init__(self, policy: ClusterPolicy) -> None:
        self._policy = policy
        self._since_s: dict[tuple[str, int], float] = {}

    def expired(self, unused: Iterable[tuple[str, int]], now_s: float) -> list[tuple[str, int]]:
        """Returns those of `unused`, each a node with the revision of its empty orders, that were so for long
        enough."""
        self._since_s = {each: self._since_s.get(each, now_s) for each in unused}
        kept_s = self._policy.orders_kept_s
        return sorted(each for each, since_s in self._since_s.items() if now_s - since_s >= kept_s)


class HistoryKept:
    """Remembers when the store had which revision, to let it forget what is old enough."""

    def __init__(self, policy: ClusterPolicy) -> None:
        self._policy = policy
        self._seen: deque[tuple[float, int]] = deque()

    def compact_to(self, now_s: float, revision: int) -> int | None:
        """Returns the newest revision that is older than what is kept; None: there is none yet. revision: of the store
        now."""
        if self._seen and revision < self._seen[-1][1]:
            self._seen.clear()  # the store has lost its data and counts anew
        self._seen.append((now_s, revision))
        found = None
        while self._seen and now_s - self._seen[0][0] >= self._policy.history_kept_s:
            found = self._seen.popleft()[1]
        return found
