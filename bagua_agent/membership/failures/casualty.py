"""Decides whether a worker's failure is the casualty of another worker's end, in live mode.

A worker that dies or is lost with its host breaks the groups that other workers built with it: a group of the script's
own ends these workers too, though they are not at fault. root_cause.py decides which ending explains which; this module
decides between which workers: a worker and its *fellows*, those listed in a generation together with it. Pure.

    its text tells of           the fellow's end                                    a casualty
    a lost peer                 killed, raised, gone with its host or asked to go   however long ago
    a lost peer                 told of a lost peer or connection too, and earlier  if both were listed of late
    a lost connection           whatever explains more                              if both were listed of late
    a lost peer                 a mate killed because the worker's host was silent  if both were listed of late
    anything else               any                                                 never

"Of late": in the newest record that lists it, or the one before. Only ends of its own fellows can explain a failure, so
a script that breaks by itself uses up the budget all the same. Without any such fellow a failure is its own cause.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from bagua_agent.membership.failures.root_cause import Kind, classify, explains, first_cause, tells_of_another
from bagua_agent.membership.view import FailureView, JobView
from bagua_contract.records import Generation, Placement
from bagua_contract.replica import Replica

MOST_FORMER_FELLOWS = 64


@dataclass(frozen=True, slots=True)
class Fellow:
    """A worker that was listed in a generation, or is in a replica, together with another worker.

    last_listed: number of the newest record that listed both; 0: none did, and global_rank is the fellow's shard. mate:
    they are of one replica of several workers, so a generation goes on without both whichever ended.
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
class Company:
    """The fellows of one worker. newest: number of the newest record that lists the worker; 0: none. fellows: the
    newest ones last."""

    newest: int = 0
    fellows: tuple[Fellow, ...] = ()

    def is_late(self, fellow: Fellow) -> bool:
        """Tells whether the fellow was listed together with the worker until of late."""
        return fellow.last_listed >= self.newest - 1


NO_COMPANY = Company()


def company_after(known: Company, worker_id: str, record: Generation) -> Company:
    """Returns the worker's company once `record` is written. Former fellows beyond the newest few are forgotten."""
    own = record.placement_of(worker_id)
    if own is None:
        return known
    size = record.replica_size
    mates = {m.worker_id for m in record.members if size > 1 and m.replica_rank == own.replica_rank}
    listed = {m.worker_id for m in record.members}
    former = [f for f in known.fellows if f.worker_id not in listed]
    present = [
        _fellow(m, record.number, m.worker_id in mates) for m in record.members if m.worker_id != worker_id
    ]
    return Company(record.number, (*former[-MOST_FORMER_FELLOWS:], *present))


def company_in(replica: Replica, worker_id: str) -> Company:
    """Returns the worker's company before a generation lists it: the other workers of its replica."""
    return Company(
        0,
        tuple(
            Fellow(m.worker_id, m.agent_id, m.node_name, shard, 0, mate=True)
            for shard, m in enumerate(replica.members)
            if m.worker_id != worker_id
        ),
    )


def casualty_of(failure: FailureView, company: Company, view: JobView, *, whole: bool = True) -> str:
    """Returns the worker whose end explains `failure`, for a person to read; empty: none as far as `view` shows. whole:
    `view` has all agents; else only records show which agents are gone."""
    if not tells_of_another(failure.summary, failure.traceback_tail):
        return ""
    known = {f.worker_id: f for f in company.fellows}
    causes = [
        f
        for f in view.failures.values()
        if f.worker_id in known and _explains(f, failure, late=company.is_late(known[f.worker_id]))
    ]
    cause = first_cause(causes)
    if cause is not None:
        return f"{known[cause.worker_id]} ({cause.summary})"
    lost_peer = classify(failure.summary, failure.traceback_tail).kind is Kind.CASUALTY
    gone = _last(f for f in company.fellows if (lost_peer or company.is_late(f)) and _is_gone(f, view, whole))
    return f"{gone} (gone)" if gone is not None else ""


def _explains(cause: FailureView, failure: FailureView, *, late: bool) -> bool:
    if not explains(cause, failure):
        return False
    # A casualty's own successors would else explain each other away without end.
    began_by_itself = not tells_of_another(cause.summary, cause.traceback_tail)
    lost_peer = classify(failure.summary, failure.traceback_tail).kind is Kind.CASUALTY
    return late or (began_by_itself and lost_peer)


def _is_gone(fellow: Fellow, view: JobView, whole: bool) -> bool:
    """Tells whether the fellow left, or was lost with its host. A worker that failed or ended well has its own
    record."""
    if fellow.worker_id in view.failures or fellow.worker_id in view.finished:
        return False
    dropped = (
        view.generation is not None
        and not fellow.mate
        and view.generation.placement_of(fellow.worker_id) is None
    )
    return dropped or (whole and fellow.agent_id not in view.agents)


def _fellow(placement: Placement, number: int, mate: bool) -> Fellow:
    return Fellow(
        placement.worker_id, placement.agent_id, placement.node_name, placement.global_rank, number, mate
    )


def _last(fellows: Iterable[Fellow]) -> Fellow | None:
    return next(iter(reversed(list(fellows))), None)
