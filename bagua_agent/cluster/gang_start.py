"""Finds nodes for a whole job, from free nodes and from those that other jobs can spare: all of them or none."""

from __future__ import annotations

from dataclasses import dataclass

from bagua_agent.cluster.next_node import best_free
from bagua_agent.cluster.node_release import for_another
from bagua_agent.cluster.slot_ledger import Holding, Ledger


@dataclass(frozen=True, slots=True)
class Found:
    """The result of a search for nodes. enough: the nodes are promised. count: how many there would have been."""

    enough: bool
    count: int


def give_all(ledger: Ledger, holding: Holding, count: int) -> Found:
    """Promises `count` more nodes to the job if so many can be had, else changes nothing."""
    among = open_nodes(ledger, holding)
    if len(among) < count:
        return Found(False, len(best_free(ledger, holding, count, among)))
    chosen = best_free(ledger, holding, count, among)
    free = set(chosen)
    releases = for_another(ledger, holding, count - len(chosen), [n for n in among if n not in free])
    chosen += [release.node_name for release in releases]
    if len(chosen) < count:
        for release in reversed(releases):
            for order in reversed(release.orders):
                ledger.put_back(release.node_name, order)
        return Found(False, len(chosen))
    for node_name in chosen:
        ledger.give(holding, node_name)
    return Found(True, count)


def give_free(ledger: Ledger, holding: Holding, count: int) -> int:
    """Promises up to `count` free nodes to the job, and returns how many there were."""
    chosen = best_free(ledger, holding, count, open_nodes(ledger, holding))
    for node_name in chosen:
        ledger.give(holding, node_name)
    return len(chosen)


def give_free_whole(ledger: Ledger, holding: Holding, count: int) -> bool:
    """Promises `count` free nodes to the job if there are so many, else changes nothing."""
    chosen = best_free(ledger, holding, count, open_nodes(ledger, holding)) if count else []
    if not chosen or len(chosen) < count:
        return False
    for node_name in chosen:
        ledger.give(holding, node_name)
    return True


def open_nodes(ledger: Ledger, holding: Holding) -> list[str]:
    """Returns the nodes that fit and that no job before this one waits for."""
    fitting, claimed = ledger.fitting(holding.job), ledger.claimed
    return [n for n in fitting if n not in claimed] if claimed else fitting
