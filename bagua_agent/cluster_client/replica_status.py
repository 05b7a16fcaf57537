"""Shows the replicas of a job with sharded models: which workers hold one copy together, and what each replica does."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from google.protobuf.message import DecodeError

from bagua_agent.etcd.client import KeyValue, Store
from bagua_agent.etcd.keys import JobKeys
from bagua_agent.large_jobs.stored_record import whole_value
from bagua_agent.membership.replica_groups import groups_in
from bagua_contract.records import Generation
from bagua_contract.replica import Replica


@dataclass(frozen=True, slots=True)
class ReplicaStatus:
    """The state of a replica. replica_rank: in the newest generation; None outside it. state: member, joins, or over
    with the reason. workers: node and slot of each, by shard rank."""

    replica_rank: int | None
    state: str
    workers: tuple[tuple[str, int], ...]

    @property
    def places(self) -> str:
        """The place of each worker, as node:slot."""
        return ", ".join(f"{node}:{slot}" for node, slot in self.workers)


def read_replicas(store: Store, job_id: str, complain: Callable[[str], object]) -> tuple[ReplicaStatus, ...]:
    """Returns the replicas of a job; none where each worker is a replica. complain: called with a generation that can't
    be read. Raises StoreUnavailable."""
    keys = JobKeys(job_id)
    records = store.get_prefix(keys.replicas)[0]
    found = store.get(keys.generation)
    value = None if found is None else whole_value(store, keys, found.value)
    try:
        generation = None if value is None else Generation.decode(value)
    except (DecodeError, ValueError) as error:
        complain(f"{keys.generation} can't be read ({error}), so the replicas of job {job_id!r} are unknown")
        return ()
    return replicas_of(generation, records)


def replicas_of(generation: Generation | None, records: Iterable[KeyValue]) -> tuple[ReplicaStatus, ...]:
    """Returns members by replica rank, then the others by id. Passes unreadable records over, as agents do. Pure."""
    size = 1 if generation is None else generation.replica_size
    members = list(groups_in(generation, size)) if generation is not None and size > 1 else []
    listed = {m.worker_id for group in members for m in group}
    shown = [
        ReplicaStatus(group[0].replica_rank, "member", tuple((m.node_name, m.slot) for m in group))
        for group in members
    ]
    others = sorted(filter(None, map(_decoded, records)), key=lambda replica: replica.replica_id)
    for replica in others:
        if listed.isdisjoint(replica.worker_ids):
            state = f"over: {replica.over}" if replica.over else "joins"
            shown.append(ReplicaStatus(None, state, tuple((m.node_name, m.slot) for m in replica.members)))
    return tuple(shown)


def _decoded(record: KeyValue) -> Replica | None:
    try:
        return Replica.decode(record.value)
    except (DecodeError, ValueError):
        return None
