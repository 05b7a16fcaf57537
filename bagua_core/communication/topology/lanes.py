"""Lists the workers of each lane of a generation. Pure: knows ranks and nodes, no transport."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from bagua_core.communication.communicator import Lane

Nodes = tuple[tuple[int, ...], ...]


class ReplicaPlace(Protocol):
    """A worker's place in a generation."""

    @property
    def replica_rank(self) -> int: ...

    @property
    def shard_rank(self) -> int: ...


def of_shard(places: Sequence[ReplicaPlace], global_rank: int) -> tuple[int, ...] | None:
    """Returns the global ranks with the shard of `global_rank`, by replica rank. None if each worker is a replica.
    places: by global rank."""
    if all(place.shard_rank == 0 for place in places):
        return None
    own = places[global_rank].shard_rank
    ranks = [rank for rank, place in enumerate(places) if place.shard_rank == own]
    return tuple(sorted(ranks, key=lambda rank: places[rank].replica_rank))


def among(nodes: Nodes, ranks: Sequence[int]) -> Nodes:
    """Returns the nodes of some workers, which are called by their places among `ranks`."""
    place = {rank: at for at, rank in enumerate(ranks)}
    of_each = (tuple(place[rank] for rank in node if rank in place) for node in nodes)
    return tuple(sorted(node for node in of_each if node))


def nodes_of(agent_ids: Sequence[str]) -> Nodes:
    """Returns the ranks of each node, by their smallest rank. agent_ids: of each rank's node, by global_rank."""
    by_agent: dict[str, list[int]] = {}
    for global_rank, agent_id in enumerate(agent_ids):
        by_agent.setdefault(agent_id, []).append(global_rank)
    return tuple(tuple(ranks) for ranks in by_agent.values())


def members_of(
    lane: Lane, nodes: Nodes, global_rank: int, workers: Sequence[int] | None = None
) -> tuple[int, ...] | None:
    """Returns the global ranks in the lane that `global_rank` is in, ascending; None if it has no place in one.
    workers: the global ranks among which lanes are made, default all.

    Where each node has one worker, NODE and LEADERS are not used: see routes.py and peer_selection.py.
    """
    if workers is not None:
        present = (tuple(rank for rank in node if rank in workers) for node in nodes)
        nodes = tuple(node for node in present if node)
    if lane in (Lane.NODE, Lane.LEADERS) and all(len(ranks) == 1 for ranks in nodes):
        return None
    if lane is Lane.NODE:
        return next(ranks for ranks in nodes if global_rank in ranks)
    if lane is Lane.LEADERS:
        leaders = tuple(ranks[0] for ranks in nodes)
        return leaders if global_rank in leaders else None
    return tuple(sorted(rank for ranks in nodes for rank in ranks))
