"""Tells which workers form a replica, and which workers of a job with replicas are present as a whole one. Pure.

A job with a replica size of 1 has no groups: each of its workers is a replica. The replica of a member is read from the
generations that list it, so a removed record harms none; that of a joiner from its record. A worker is in one replica
in its life, always in the same place (A2 of docs/design/replicas.md): of two records that list it the older one counts.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from bagua_agent.membership.view import JobView, MemberView
from bagua_contract.records import Generation, Placement
from bagua_contract.replica import Replica

Group = tuple[str, ...]
"""The workers of a replica in the order of their shards."""


@dataclass(frozen=True, slots=True)
class Groups:
    """The job's replicas. of: worker to its replica's workers, of replicas that are not over. over: workers of those
    that are. records: the records that count, by id."""

    of: Mapping[str, Group]
    over: frozenset[str]
    records: Mapping[str, Replica]


def groups(view: JobView) -> Groups:
    """Returns all replicas of the job."""
    found: dict[str, Group] = {}
    if view.replica_size <= 1:
        return Groups({}, frozenset(), {})
    for record in (*view.earlier, view.generation):
        for group in groups_in(record, view.replica_size) if record is not None else ():
            _add(found, tuple(m.worker_id for m in group))
    records: dict[str, Replica] = {}
    over: set[str] = set()
    for known in sorted(view.replicas.values(), key=lambda r: (r.order, r.replica.replica_id)):
        replica = known.replica
        if replica.size != view.replica_size or not _add(found, replica.worker_ids):
            continue
        records[replica.replica_id] = replica
        if replica.over:
            over.update(replica.worker_ids)
    return Groups({w: g for w, g in found.items() if w not in over}, frozenset(over), records)


def _add(found: dict[str, Group], group: Group) -> bool:
    """Adds the group unless one of its workers is in another one. Returns whether it then is the group of each of its
    workers."""
    known = {found.get(w) for w in group}
    if known == {None}:
        found.update(dict.fromkeys(group, group))
        return True
    return known == {group}


def groups_in(record: Generation, size: int) -> Iterator[tuple[Placement, ...]]:
    """Yields the members of each replica; `lists_whole_replicas` must hold."""
    for start in range(0, len(record.members), size):
        yield record.members[start : start + size]


def lists_whole_replicas(record: Generation, size: int) -> bool:
    """Tells whether a leader of a job with replicas of `size` workers may have written the record (A1)."""
    if size <= 1:
        return not any(m.replica_rank or m.shard_rank for m in record.members)
    return record.world_size % size == 0 and all(
        (m.replica_rank, m.shard_rank) == divmod(m.global_rank, size) for m in record.members
    )


def present_as_whole(raw: Mapping[str, MemberView], known: Groups) -> dict[str, MemberView]:
    """Returns the workers whose replicas are there as a whole, with their replicas. raw: the workers that are there."""
    return {
        worker_id: replace(member, replica=group)
        for worker_id, member in raw.items()
        if (group := known.of.get(worker_id)) is not None and all(w in raw for w in group)
    }


def whole(workers: Iterable[tuple[str, Group]]) -> set[str]:
    """Returns the workers whose replicas are entirely among `workers`, which are pairs of a worker and its replica. A
    worker without a replica always counts."""
    listed = list(workers)
    ids = {worker_id for worker_id, _ in listed}
    return {worker_id for worker_id, group in listed if all(w in ids for w in group)}


def whole_members(members: Collection[MemberView]) -> list[MemberView]:
    ids = whole((m.worker_id, m.replica) for m in members)
    return [m for m in members if m.worker_id in ids]
