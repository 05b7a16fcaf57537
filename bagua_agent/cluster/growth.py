"""Gives unclaimed nodes to running jobs: to the one with the smallest part of its maximum, up to its next size.

Without sizes the next size is one node more.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush

from bagua_agent.cluster.gang_start import open_nodes
from bagua_agent.cluster.next_node import FreeNodes
from bagua_agent.cluster.slot_ledger import Holding, Ledger


def grow(ledger: Ledger, holdings: list[Holding]) -> None:
    """Gives unclaimed nodes to the jobs. holdings: jobs that have their minimum. Nodes that a waiting job could use are
    claimed, and stay free for it."""
    if not any(free > 0 for free in ledger.free.values()):
        return
    growers = {h.job.job_id: h for h in holdings if h.step}
    queue = [_share(h) for h in growers.values()]
    heapify(queue)
    given: list[str] = []
    free: dict[str, FreeNodes] = {}
    while queue:
        holding = growers[heappop(queue)[-1]]
        job_id = holding.job.job_id
        if job_id not in free:
            free[job_id] = FreeNodes(ledger, holding, open_nodes(ledger, holding), given)
        found = [n for _ in range(holding.step) if (n := free[job_id].best()) is not None]
        if len(found) < holding.step:
            continue  # from here on others only take: there will never be enough
        for node_name in found:
            ledger.give(holding, node_name)
        given += found
        if holding.step:
            heappush(queue, _share(holding))


def _share(holding: Holding) -> tuple[float, tuple[int, int], str]:
    return (len(holding.kept) / holding.room.most, holding.rank, holding.job.job_id)
