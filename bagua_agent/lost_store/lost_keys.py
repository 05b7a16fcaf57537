"""Notices that the store lost the job's keys, and has them written again.

recreation.py decides what is written. Until it has settled, this agent should not run for election.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping

from bagua_agent.base.errors import JobReplaced
from bagua_agent.etcd import cluster_keys
from bagua_agent.etcd.client import KeyValue, absent
from bagua_agent.etcd.keys import AfterLoss
from bagua_agent.etcd.mirror import Change
from bagua_agent.history import job_history
from bagua_agent.job_state.context import JoinedJob
from bagua_agent.large_jobs.limits import USUAL_LIMITS, Limits
from bagua_agent.lost_store.recreation import (
    SETTLE_S,
    GiveWay,
    Memory,
    NothingLost,
    PutAgain,
    RecreationVerdict,
    after_a_loss,
)

LOOK_AGAIN_S = 0.5


class LostKeys:
    """Watches one job's keys for a loss. found(): all keys under the job's prefix, as far as this agent has seen; None
    while it is reading on. submission: nonce of the one that the job is of, if it was submitted: once that is removed
    nothing is put again."""

    def __init__(
        self,
        job: JoinedJob,
        found: Callable[[], Mapping[str, KeyValue] | None],
        limits: Limits = USUAL_LIMITS,
        submission: str = "",
    ) -> None:
        self._removal = cluster_keys.removal(submission) if submission else None
        self._was_removed = threading.Event()
        self._limits = limits
        self._job = job
        self._found = found
        keys = job.keys
        self._own_key = keys.agent(job.agent_id)
        self._kept = keys.after_loss(
            AfterLoss.PUT_AGAIN, AfterLoss.PUT_OVER_A_NEW_JOB, AfterLoss.NEWEST_RECORD
        )
        self._settled_at_s = float("-inf")  # after a loss of the job's keys
        self._owners_back_at_s = float("-inf")  # after a loss of this agent's own
        self._losses = 0

    def settling_for_s(self, now_s: float) -> float:
        """Returns how long the others should still be given before any agent leads."""
        return max(0.0, self._settled_at_s - now_s, self._owners_back_at_s - now_s)

    def own_keys_lost(self, now_s: float) -> None:
        """Notes that the store lost what this agent keeps in it. The others' keys may be lost too, and an agent whose
        key is not there yet would count as gone. That another agent has put the job's keys again by now does not change
        that."""
        self._owners_back_at_s = now_s + SETTLE_S

    def notice(self, changes: tuple[Change, ...], now_s: float) -> None:
        """Checks `changes` for a loss, before any part of the agent acts on them. Raises JobReplaced."""
        if any(change.key == self._own_key and change.value is None for change in changes):
            self.own_keys_lost(now_s)
        about = [change for change in changes if change.key in self._kept]
        if not about:
            return
        verdict = self._verdict()
        if isinstance(verdict, GiveWay):
            raise JobReplaced(verdict.reason)
        if self._job.seen.result is None and any(change.value is None for change in about):
            if now_s > self._settled_at_s:
                self._losses += 1
                self._job.history.of_job(job_history.keys_lost(self._job.agent_id, self._losses))
                self._job.terminal.tell("etcd has lost keys of the job; putting them again")
            self._settled_at_s = now_s + SETTLE_S

    def look(self, now_s: float) -> None:
        """Mends the keys once the whole content of the store is read. Raises JobReplaced."""
        verdict = self._verdict()
        if isinstance(verdict, GiveWay):
            raise JobReplaced(verdict.reason)
        self._mend(now_s)

    def mend(self, changes: tuple[Change, ...], now_s: float) -> None:
        """Has lost keys written again, after LocalJobState took `changes` in."""
        remembered, replicas = self._job.seen.remembered, self._job.keys.replicas
        if any(
            change.key in self._kept or (change.key.startswith(replicas) and change.key in remembered)
            for change in changes
        ):
            self._mend(now_s)

    def _is_removed(self) -> bool:
        """Asks the store whether the job was removed from the cluster."""
        if self._removal is not None and self._job.store.get(self._removal) is not None:
            self._was_removed.set()
        return self._was_removed.is_set()

    def _verdict(self) -> RecreationVerdict:
        seen, found = self._job.seen, self._found()
        if found is None:
            return NothingLost()  # that anybody knows of; what is read comes as a change
        memory = Memory(
            nonce=seen.spec.nonce,
            values=dict(seen.remembered),
            generation=seen.generation,
            # Without a record of ours the commits that are known may be another job's.
            committed=seen.generation is not None and seen.commit_is_known,
        )
        return after_a_loss(self._job.keys, memory, found, self._limits)

    def _mend(self, now_s: float) -> None:
        job = self._job
        if self._was_removed.is_set():
            raise JobReplaced("the job was removed from the cluster while this node was out of touch")
        match self._verdict():
            case PutAgain(compares, puts, before):
                kept = [absent(self._removal)] if self._removal is not None else []

                def put_again() -> None:
                    if self._is_removed():
                        return
                    for part in before:
                        job.store.put(part.key, part.value)
                    job.store.transact([*compares, *kept], puts)

                # Refused if another agent was first; then its write is a change, and this is decided again.
                job.writes.until_done("lost keys", put_again)
                job.timers.set("lost keys", now_s + LOOK_AGAIN_S, self._mend)
            case _:
                pass
