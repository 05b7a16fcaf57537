"""Chooses free nodes for a job: those with the fewest slots left over, so that large free nodes stay free."""

from __future__ import annotations

from collections.abc import Iterable
from heapq import heapify, heappop, heappush, nsmallest

from bagua_agent.cluster.slot_ledger import Holding, Ledger, needed

# what is left over counts first; then small nodes before large ones; by name, so that every scheduler picks the same
Fit = tuple[bool, int, int, str]


def best_free(ledger: Ledger, holding: Holding, count: int, among: Iterable[str]) -> list[str]:
    """Returns at most `count` nodes whose slots no other job is promised, best first; last those that a unit has to
    leave."""
    free = (n for n in among if _is_free(ledger, holding, n))
    return nsmallest(count, free, key=lambda n: _fit(ledger, holding, n))


def _is_free(ledger: Ledger, holding: Holding, node_name: str) -> bool:
    node = ledger.nodes[node_name]
    taken = holding.job.job_id in ledger.orders[node_name]
    return node.present and not taken and ledger.free[node_name] >= needed(holding.job, node)


def _fit(ledger: Ledger, holding: Holding, node_name: str) -> Fit:
    node = ledger.nodes[node_name]
    left_over = ledger.free[node_name] - needed(holding.job, node)
    return (ledger.still_taken(node_name) > left_over, left_over, node.slots, node_name)


class FreeNodes:
    """The free nodes of one job, best first, while others take from the same: each call costs a logarithm.

    Only for phases in which slots are given and none are taken back.
    """

    def __init__(self, ledger: Ledger, holding: Holding, among: Iterable[str], given: list[str]) -> None:
        """Collects the free nodes among `among`. given: grows by each node of which a job was given slots."""
        self._ledger, self._holding, self._given = ledger, holding, given
        self._among = set(among)
        self._heap = [_fit(ledger, holding, n) for n in self._among if _is_free(ledger, holding, n)]
        heapify(self._heap)
        self._known = len(given)

    def best(self) -> str | None:
        """Returns the best node that is free by now and that no unit has to leave first; None if there is none."""
        for name in self._given[self._known :]:
            if name in self._among and _is_free(self._ledger, self._holding, name):
                heappush(self._heap, _fit(self._ledger, self._holding, name))
        self._known = len(self._given)
        while self._heap:
            fit = heappop(self._heap)
            name = fit[-1]
            current = _is_free(self._ledger, self._holding, name) and (
                fit == _fit(self._ledger, self._holding, name)
            )
            if current and not fit[0]:
                return name
        return None
