"""Decides whether all workers that may hold the job's state left on purpose, and the state is saved. Pure.

Used by ending.py for the result *stopped*, by decision.py for a start after such an end, and by an agent for its report
when it leaves. Invariant L1 of docs/design/leaving.md: a worker counts as gone only if its own agent reports it.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from bagua_agent.membership.view import DepartureView, JobView
from bagua_contract.records import Generation, GenerationKind


@dataclass(frozen=True, slots=True)
class Parting:
    """States that all workers that may hold the state are gone, at least one of them on purpose.

    may_stop: the job may be marked stopped. reason: what was saved, or why nothing was. failed: some of them failed, so
    not all of the loss was asked for.
    """

    may_stop: bool
    reason: str
    failed: bool = False


def parting(view: JobView) -> Parting | None:
    """Returns what was saved when all workers that may hold the state are gone. None: one of them has not been seen to
    end, or none left on purpose."""
    gone = view.departures.keys() | view.failures.keys() | view.finished
    held = _may_hold(view)
    if held is None or not held <= gone or not (held or view.departures.keys()) & view.departures.keys():
        return None
    failed = bool(held & view.failures.keys())
    if view.has_checkpoints:
        return replace(_saved(view), failed=failed)
    return Parting(True, "every worker left; there is no --checkpoint-dir, so no state is kept", failed)


def unseen(view: JobView) -> tuple[str, ...]:
    """Returns the nodes of workers that may hold the state and have not been seen to end, for people."""
    gone = view.departures.keys() | view.failures.keys() | view.finished
    missing = (_may_hold(view) or frozenset()) - gone
    records = (*view.earlier, *((view.generation,) if view.generation is not None else ()))
    return tuple(sorted({m.node_name for g in records for m in g.members if m.worker_id in missing}))


def _may_hold(view: JobView) -> frozenset[str] | None:
    """Returns the workers that may hold the state, as the records tell; None: the records that would tell are not known
    here."""
    record = view.generation
    if record is None:
        return None if view.committed_generation else frozenset()
    if not record.members and record.base and view.record(record.base) is None:
        return _listed_by(view.departures.values(), record.base)
    known = max(view.committed_generation, record.number if _was_left_behind(view, record) else 0)
    return frozenset(
        m.worker_id
        for g in (*view.earlier, record)
        for m in g.members
        # Members of a gathering have no state yet, nor has a newcomer of a generation without a known commit.
        if not g.is_gathering and (m.holder or g.base == 0 or g.number <= known)
    )


def _was_left_behind(view: JobView, record: Generation) -> bool:
    """Tells whether a worker left at the boundary at which `record`, which does without it, took effect. So there was a
    step in that generation, though the report of it may be late. A worker that saved its part left elsewhere."""
    return record.kind is GenerationKind.PLANNED and any(
        0 < d.generation < record.number and record.placement_of(d.worker_id) is None and not d.parts
        for d in view.departures.values()
    )


def _listed_by(departures: Collection[DepartureView], number: int) -> frozenset[str] | None:
    """Returns the members of generation `number`, if all of them have departed: each departure tells how many there
    were."""
    members = [d for d in departures if d.generation == number]
    if not members or len(members) < max(d.world_size for d in members):
        return None
    return frozenset(d.worker_id for d in members)


def _saved(view: JobView) -> Parting:
    told = [d for d in view.departures.values() if not d.state.is_none]
    if not told:
        held = _may_hold(view)
        # A record after the first one does not prove that anything was committed, but the workers know.
        if held and all(w in view.departures and view.departures[w].holds_nothing for w in held):
            return Parting(True, "every worker left before the first step")
        if view.has_trained:
            return Parting(False, "every worker left, and none confirmed a last checkpoint")
        return Parting(True, "every worker left before the first step")
    furthest = max(d.state for d in told)
    of_furthest = [d for d in told if d.state == furthest]
    for parts, replica in {(d.parts, d.replica) for d in of_furthest if d.parts}:
        written = {d.part for d in of_furthest if (d.parts, d.replica) == (parts, replica) and d.written}
        if len(written) == parts:  # each is below it: see decode.py
            return Parting(True, f"every worker left; the checkpoint of step {furthest.step} is written")
    problems = [f"{d.problem} (on {d.node_name})" for d in of_furthest if d.problem]
    why = problems[0] if problems else "a worker ended before its part was written"
    return Parting(
        False, f"every worker left, but the checkpoint of step {furthest.step} is not whole: {why}"
    )


@dataclass(frozen=True, slots=True)
class Prospect:
    """The future of the job without this node, as far as it is known here.

    goes_on: other nodes stay. awaits_result: the leader is about to say how the job ended. text: for people, once this
    node waits no longer.
    """

    goes_on: bool
    awaits_result: bool
    text: str


def prospect(view: JobView, own_agent_id: str, *, others_stay: bool, ends_when_all_leave: bool) -> Prospect:
    """Returns the future of the job for a node whose workers have left. others_stay: another node is there that does
    not leave."""
    left = parting(view)
    if others_stay:
        record = view.generation
        if record is not None and any(m.agent_id != own_agent_id for m in record.members):
            return Prospect(True, False, "left; the job goes on without this node")
        if left is not None:
            return Prospect(True, False, f"left; the nodes that are there begin again: {left.reason}")
        own = view.agents.get(own_agent_id)
        nodes = ", ".join([n for n in unseen(view) if own is None or n != own.node_name][:8])
        keep = (
            f"the state stays on {nodes}, which waits for enough nodes" if nodes else "other nodes are there"
        )
        return Prospect(True, False, f"left; {keep}")
    if view.restarts:
        return Prospect(False, False, "left; no node of the job is left")
    if not ends_when_all_leave:
        return Prospect(False, False, "left; no node of the job is left, and its scheduler says what follows")
    if left is not None and left.may_stop:
        return Prospect(False, True, f"{left.reason}; but no leader marked the job stopped")
    if left is not None:
        follows = "the next start goes on from the newest whole checkpoint"
        return Prospect(False, False, f"the job is not marked stopped: {left.reason}; {follows}")
    if view.generation is None:
        return Prospect(False, False, "left before the first generation; nothing was trained")
    nodes = ", ".join(unseen(view)[:8]) or "other nodes"
    text = f"the job is not marked stopped: workers on {nodes} have not been seen to end; the next start waits for them"
    return Prospect(False, True, text)
