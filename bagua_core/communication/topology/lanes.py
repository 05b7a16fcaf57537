"""Lists the workers of each lane of a generation. Pure: knows ranks and nodes, no transport."""

from __future__ import annotations

from collections.abc import Sequence

from bagua_core.communication.communicator import Lane

Nodes = tuple[tuple[int, ...], ...]


def nodes_of(agent_ids: Sequence[str]) -> Nodes:
    """agent_ids: of each rank's node, by global_rank. The ranks of each node, by their smallest rank."""
    by_agent: dict[str, list[int]] = {}
    for global_rank, agent_id in enumerate(agent_ids):
        by_agent.setdefault(agent_id, []).append(global_rank)
    return tuple(tuple(ranks) for ranks in by_agent.values())


def members_of(lane: Lane, nodes: Nodes, global_rank: int) -> tuple[int, ...] | None:
    """Global ranks in the lane that `global_rank` is in, ascending; None if it has no place in one.

    Where each node has one worker, NODE and LEADERS are not used: see routes.py and peer_selection.py.
    """
    if lane in (Lane.NODE, Lane.LEADERS) and all(len(ranks) == 1 for ranks in nodes):
        return None
    if lane is Lane.NODE:
        return next(ranks for ranks in nodes if global_rank in ranks)
    if lane is Lane.LEADERS:
        leaders = tuple(ranks[0] for ranks in nodes)
        return leaders if global_rank in leaders else None
    return tuple(sorted(rank for ranks in nodes for rank in ranks))
