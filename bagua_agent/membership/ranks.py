"""Assigns ranks to workers. A function of revisions and generation numbers alone.

Every leader gives the same workers the same ranks: nothing here depends on arrival or on a clock.
Invariants: ranks are contiguous, also those of a node; rank 0 is a holder if there is any. In a job with replicas
they are contiguous for each replica, in the order of its shards, and a node's need not be.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from bagua_contract.records import Placement


@dataclass(frozen=True, slots=True)
class Chosen:
    """A worker that will be in the generation, before it has a rank. replica: the workers of its replica in the order
    of their shards; none in a job without replicas."""

    worker_id: str
    agent_id: str
    node_name: str
    slot: int
    topology: str
    store_address: str
    since_generation: int
    join_revision: int
    holder: bool
    replica: tuple[str, ...] = ()


def assign(chosen: Iterable[Chosen]) -> tuple[Placement, ...]:
    """Returns the placements in rank order. The order of `chosen` does not matter. Replicas must be whole."""
    chosen = list(chosen)
    if any(w.replica for w in chosen):
        return _assign_replicas(chosen)
    nodes: defaultdict[str, list[Chosen]] = defaultdict(list)
    for worker in chosen:
        nodes[worker.agent_id].append(worker)
    placements: list[Placement] = []
    for node_rank, node in enumerate(sorted(nodes.values(), key=_node_order)):
        # by id last: a slot listed twice must still give one order
        workers = sorted(node, key=lambda w: (w.slot, w.worker_id))
        if node_rank == 0:
            # The first slot of the first node may be a respawned worker without state: rank 0 goes to the
            # node's first holder, the others keep the order of their slots.
            first = next((w for w in workers if w.holder), workers[0])
            workers = [first] + [w for w in workers if w is not first]
        for local_rank, w in enumerate(workers):
            placements.append(
                Placement(
                    worker_id=w.worker_id,
                    agent_id=w.agent_id,
                    node_name=w.node_name,
                    slot=w.slot,
                    global_rank=len(placements),
                    node_rank=node_rank,
                    local_rank=local_rank,
                    store_address=w.store_address,
                    since_generation=w.since_generation,
                    join_revision=w.join_revision,
                    holder=w.holder,
                )
            )
    return tuple(placements)


def _assign_replicas(chosen: list[Chosen]) -> tuple[Placement, ...]:
    """Returns the placements of a job with replicas: replicas in the order that rule 5 gives nodes, nodes in that of
    their first worker."""
    by_id = {w.worker_id: w for w in chosen}
    replicas = [[by_id[w] for w in group] for group in {w.replica for w in chosen}]
    slots: defaultdict[str, list[int]] = defaultdict(list)
    for worker in chosen:
        slots[worker.agent_id].append(worker.slot)
    local = {a: sorted(found) for a, found in slots.items()}
    node_ranks: dict[str, int] = {}
    placements: list[Placement] = []
    for replica_rank, replica in enumerate(sorted(replicas, key=_replica_order)):
        for shard_rank, w in enumerate(replica):
            placements.append(
                Placement(
                    worker_id=w.worker_id,
                    agent_id=w.agent_id,
                    node_name=w.node_name,
                    slot=w.slot,
                    global_rank=len(placements),
                    node_rank=node_ranks.setdefault(w.agent_id, len(node_ranks)),
                    local_rank=local[w.agent_id].index(w.slot),
                    store_address=w.store_address,
                    since_generation=w.since_generation,
                    join_revision=w.join_revision,
                    holder=w.holder,
                    replica_rank=replica_rank,
                    shard_rank=shard_rank,
                )
            )
    return tuple(placements)


def _replica_order(replica: list[Chosen]) -> tuple[bool, int, str, int, str]:
    return (
        not all(w.holder for w in replica),
        min(w.since_generation for w in replica),
        min(w.topology for w in replica),
        min(w.join_revision for w in replica),
        replica[0].worker_id,
    )


def _node_order(node: list[Chosen]) -> tuple[bool, int, str, int, str]:
    return (
        not any(w.holder for w in node),
        min(w.since_generation for w in node),
        min(w.topology for w in node),
        min(w.join_revision for w in node),
        node[0].agent_id,
    )
