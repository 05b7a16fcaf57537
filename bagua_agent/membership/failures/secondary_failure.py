"""Decides whether a worker's failure is the casualty of another worker's end, in live mode.

A worker that dies or is lost with its host breaks the groups that other workers built with it: a group of the script's
own ends these workers too, though they are not at fault. root_cause.py decides which ending explains which; this module
decides between which workers: a worker and its *co-workers*, those listed in a generation together with it. Pure.

    its text tells of           the co-worker's end                                    a casualty
    a lost peer                 killed, raised, gone with its host or asked to go   however long ago
    a lost peer                 told of a lost peer or connection too, and earlier  if both were listed of late
    a lost connection           whatever explains more                              if both were listed of late
    a lost peer                 a mate killed because the worker's host was silent  if both were listed of late
    anything else               any                                                 never

"Of late": in the newest record that lists it, or the one before. Only ends of its own co-workers can explain a
failure, so a script that breaks by itself uses up the budget all the same. Without any such co-worker a failure is its
own cause.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from bagua_agent.membership.failures.root_cause import Kind, classify, explains, first_cause, tells_of_another
from bagua_agent.membership.view import FailureView, JobView
from bagua_contract.records import Generation, Placement
from bagua_contract.replica import Replica

MOST_FORMER_CO_WORKERS = 64


@dataclass(frozen=True, slots=True)
class CoWorker:
    """A worker that was listed in a generation, or is in a replica, together with another worker.

    last_listed: number of the newest record that listed both; 0: none did, and global_rank is the co-worker's shard.
    mate: they are of one replica of several workers, so a generation goes on without both whichever ended.
    """

    worker_id: str
    agent_id: str
    node_name: str
    global_rank: int
    last_listed: int
    mate: bool = False

    def __str__(self) -> str:
        what = "global rank" if self.last_listed else "shard"
        return f"{what} {self.global_rank} on {self.node_name}"


@dataclass(frozen=True, slots=True)
class CoWorkers:
    """The co-workers of one worker. newest: number of the newest record that lists the worker; 0: none. co_workers: the
    newest ones last."""

    newest: int = 0
    co_workers: tuple[CoWorker, ...] = ()

    def is_late(self, co_worker: CoWorker) -> bool:
        """Tells whether the co-worker was listed together with the worker until of late."""
        return co_worker.last_listed >= self.newest - 1


NO_CO_WORKERS = CoWorkers()


def co_workers_after(known: CoWorkers, worker_id: str, record: Generation) -> CoWorkers:
    """Returns the worker's co-workers once `record` is written. Former co-workers beyond the newest few are
    forgotten."""
    own = record.placement_of(worker_id)
    if own is None:
        return known
    size = record.replica_size
    mates = {m.worker_id for m in record.members if size > 1 and m.replica_rank == own.replica_rank}
    listed = {m.worker_id for m in record.members}
    former = [f for f in known.co_workers if f.worker_id not in listed]
    present = [
        _co_worker(m, record.number, m.worker_id in mates) for m in record.members if m.worker_id != worker_id
    ]
    return CoWorkers(record.number, (*former[-MOST_FORMER_CO_WORKERS:], *present))


def co_workers_in(replica: Replica, worker_id: str) -> CoWorkers:
    """Returns the worker's co-workers before a generation lists it: the other workers of its replica."""
    return CoWorkers(
        0,
        tuple(
            CoWorker(m.worker_id, m.agent_id, m.node_name, shard, 0, mate=True)
            for shard, m in enumerate(replica.members)
            if m.worker_id != worker_id
        ),
    )


def secondary_failure_cause(
    failure: FailureView, co_workers: CoWorkers, view: JobView, *, whole: bool = True
) -> str:
    """Returns the worker whose end explains `failure`, for a person to read; empty: none as far as `view` shows. whole:
    `view` has all agents; else only records show which agents are gone."""
    if not tells_of_another(failure.summary, failure.traceback_tail):
        return ""
    known = {f.worker_id: f for f in co_workers.co_workers}
    causes = [
        f
        for f in view.failures.values()
        if f.worker_id in known and _explains(f, failure, late=co_workers.is_late(known[f.worker_id]))
    ]
    cause = first_cause(causes)
    if cause is not None:
        return f"{known[cause.worker_id]} ({cause.summary})"
    lost_peer = classify(failure.summary, failure.traceback_tail).kind is Kind.CASUALTY
    gone = _last(
        f for f in co_workers.co_workers if (lost_peer or co_workers.is_late(f)) and _is_gone(f, view, whole)
    )
    return f"{gone} (gone)" if gone is not None else ""


def _explains(cause: FailureView, failure: FailureView, *, late: bool) -> bool:
    if not explains(cause, failure):
        return False
    # A casualty's own successors would else explain each other away without end.
    began_by_itself = not tells_of_another(cause.summary, cause.traceback_tail)
    lost_peer = classify(failure.summary, failure.traceback_tail).kind is Kind.CASUALTY
    return late or (began_by_itself and lost_peer)


def _is_gone(co_worker: CoWorker, view: JobView, whole: bool) -> bool:
    """Tells whether the co-worker left, or was lost with its host. A worker that failed or ended well has its own
    record."""
    if co_worker.worker_id in view.failures or co_worker.worker_id in view.finished:
        return False
    dropped = (
        view.generation is not None
        and not co_worker.mate
        and view.generation.placement_of(co_worker.worker_id) is None
    )
    return dropped or (whole and co_worker.agent_id not in view.agents)


def _co_worker(placement: Placement, number: int, mate: bool) -> CoWorker:
    return CoWorker(
        placement.worker_id, placement.agent_id, placement.node_name, placement.global_rank, number, mate
    )


def _last(co_workers: Iterable[CoWorker]) -> CoWorker | None:
    return next(iter(reversed(list(co_workers))), None)
