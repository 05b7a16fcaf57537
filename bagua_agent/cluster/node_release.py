"""Chooses the nodes that a job gives back: above its maximum or an allowed size, from a node that
it should leave, or for another job."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

from bagua_agent.cluster.cluster_view import OrderView
from bagua_agent.cluster.slot_ledger import Holding, Ledger, needed

# Who is asked first: lower priority, further above its minimum, not yet working there, newer order; by name at last.
Cost = tuple[int, int, bool, int, str, str]


def down_to(ledger: Ledger, holding: Holding, size: int) -> list[str]:
    """Returns the nodes that a job gives back, of those above `size`: where it does not work yet first, then the
    newest."""
    given: list[str] = []
    while len(lasting := holding.lasting) > size:
        loose = [n for n in lasting if holding.may_lose(n)]
        if not loose:
            break
        given.append(min(loose, key=lambda n: _loose(holding, n)))
        ledger.take(holding.job.job_id, given[-1])
    return given


def what_it_should_leave(ledger: Ledger, holding: Holding) -> None:
    """Takes drained nodes and those in trouble from the job, as far as the others keep the minimum going."""
    for node_name in sorted(
        holding.left, key=lambda n: _loose(holding, n, ledger.orders[n][holding.job.job_id])
    ):
        if holding.may_lose(node_name):
            ledger.take(holding.job.job_id, node_name)


def _loose(holding: Holding, node_name: str, order: OrderView | None = None) -> tuple[bool, int, str]:
    number = (order or holding.kept[node_name]).number
    return (holding.works_on(node_name), -number, node_name)


@dataclass(frozen=True, slots=True)
class Release:
    """A node that other jobs give to a job. orders: taken from other jobs, so that the node is free."""

    node_name: str
    orders: tuple[OrderView, ...]


def for_another(ledger: Ledger, holding: Holding, count: int, among: Iterable[str]) -> list[Release]:
    """Returns at most `count` nodes that others can give to this job, the cheapest first; they are taken from them at
    once.

    On a node with several jobs as many give back as the slots need.
    """
    found: list[Release] = []
    if count <= 0:
        return found
    heap = [(victims[-1], n) for n in among if (victims := _victims(ledger, holding, n))]
    heapify(heap)
    while heap and len(found) < count:
        cost, node_name = heappop(heap)
        victims = _victims(ledger, holding, node_name)
        if not victims:
            continue
        if victims[-1] > cost:
            # a job that gave another node meanwhile has less to spare now
            heappush(heap, (victims[-1], node_name))
            continue
        found.append(Release(node_name, tuple(ledger.take(cost[-1], node_name) for cost in victims)))
    return found


def _victims(ledger: Ledger, holding: Holding, node_name: str) -> list[Cost]:
    """Returns the orders of this node that would have to go for the job, cheapest first; none if the node can't be
    freed for it."""
    node = ledger.nodes[node_name]
    orders = ledger.orders[node_name]
    if not node.present or holding.job.job_id in orders:
        return []
    short = needed(holding.job, node) - ledger.free[node_name]
    costs = sorted(
        _cost(giver, node_name)
        for job_id in orders
        if (giver := ledger.holdings.get(job_id)) is not None and giver.may_give(node_name)
    )
    chosen: list[Cost] = []
    for cost in costs:
        if short <= 0:
            break
        chosen.append(cost)
        short -= orders[cost[-1]].slots
    if short > 0:
        return []
    for cost in reversed(chosen[:-1]):
        # a larger one that came later may have made this one needless
        if short + orders[cost[-1]].slots <= 0:
            chosen.remove(cost)
            short += orders[cost[-1]].slots
    return chosen


def _cost(giver: Holding, node_name: str) -> Cost:
    working = giver.works_on(node_name)
    number = giver.kept[node_name].number
    return (giver.job.priority, -giver.surplus, working, -number, node_name, giver.job.job_id)
