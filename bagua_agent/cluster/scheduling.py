"""Decides which job runs on which nodes. Reads the whole picture each time and keeps no memory.

The result contains the orders that change, and the state of every job, with a reason that a person can act on.

Jobs that run come before jobs that wait; among each, higher priority first, then the earlier submitted:

1. A job that is over, or asked to stop, keeps its orders only where one of its units is still ending.
2. A job keeps its nodes while they are healthy. Above its maximum it gives nodes back. It leaves a node that is drained
   or in trouble once its other nodes, counting those known to work, reach the minimum; until then the node is replaced
   first.
3. A job that has begun and lacks nodes gets free nodes, and nodes that other jobs can spare if these complete it.
   A job that has not begun is completed, or gives all nodes back and keeps its place in the queue: it has no state yet.
4. A waiting job gets its whole minimum, or nothing. If the minimum becomes free once other jobs end, its nodes are
   claimed: no job behind it takes one, so a job is not overtaken for ever. A job that does not fit into the cluster
   claims nothing.
5. Unclaimed nodes go to running jobs below their maximum.

An order promises slots, and the daemon starts the unit once they are free, so the promise needs no other record.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from bagua_agent.cluster import reasons
from bagua_agent.cluster.cluster_plan import Plan
from bagua_agent.cluster.cluster_policy import ClusterPolicy
from bagua_agent.cluster.cluster_view import ClusterView, OrderView
from bagua_agent.cluster.job_ends import asked_to_leave_at_s
from bagua_agent.cluster.node_trouble import lost_at_s, settled_at_s
from bagua_agent.cluster.orders_in_force import in_force
from bagua_agent.cluster.scheduling_pass import Considered, consider
from bagua_contract.records import LARGEST_NUMBER

# A node that a job was given as growth may let it spare another that a job waits for: few rounds follow.
MOST_PASSES = 8


def plan(view: ClusterView, now_s: float, policy: ClusterPolicy) -> Plan:
    """Returns what should be written now. Pure: the same picture gives the same plan at every scheduler."""
    settled_s = settled_at_s(view.since_s, policy)
    if now_s < settled_s:
        return Plan(jobs=reasons.unsettled(view), again_at_s=settled_s)
    # at the far end orders of one number follow each other: a record of a greater one could not be written
    number = min(1 + _newest_number(view), LARGEST_NUMBER)
    found, after = _passed(view, now_s, policy, number)
    return Plan(
        orders={n: orders for n, orders in after.items() if _changes(view, n, orders)},
        outcomes=found.outcomes,
        jobs=reasons.job_plans(found),
        again_at_s=_again_at_s(found),
    )


def _passed(
    view: ClusterView, now_s: float, policy: ClusterPolicy, number: int
) -> tuple[Considered, dict[str, tuple[OrderView, ...]]]:
    """Makes passes, each on the orders of the one before, until one changes nothing: then the plan on its own result is
    empty."""
    gone: dict[str, list[str]] = {}
    for _ in range(MOST_PASSES):
        found = consider(view, now_s, policy, number)
        # only the first of them sees who was there before
        gone = found.gone = gone or found.gone
        # the ledger leaves out nodes that nothing is known of, once their orders are empty
        after = {n: () for n in view.orders} | {
            n: _sorted(orders.values()) for n, orders in found.ledger.orders.items()
        }
        if not any(_changes(view, n, orders) for n, orders in after.items()):
            break
        view = replace(view, orders=after)
    return found, after


def _changes(view: ClusterView, node_name: str, orders: tuple[OrderView, ...]) -> bool:
    if node_name in view.orders:
        return _sorted(view.orders[node_name]) != orders
    # an absent key ends nothing, so a node that no job should use gets an explicit empty list
    return bool(orders) or bool(in_force(view, node_name))


def _sorted(orders: Iterable[OrderView]) -> tuple[OrderView, ...]:
    return tuple(sorted(orders, key=lambda o: o.job_id))


def _newest_number(view: ClusterView) -> int:
    """Returns the newest number of an order. Units count too: a store that lost its keys may have lost the newest
    orders with them."""
    ordered = (o.number for orders in view.orders.values() for o in orders)
    followed = (u.order for node in view.nodes.values() for u in node.units)
    return max([*ordered, *followed], default=0)


def _again_at_s(found: Considered) -> float | None:
    """Returns when time alone changes something: a node is lost, or a job that is over has had its time."""
    ledger = found.ledger
    lost = (lost_at_s(node, ledger.policy) for node in ledger.nodes.values())
    over = [
        asked_to_leave_at_s(ledger.view, job_id, ledger.policy)
        for job_id in found.ended
        if ledger.nodes_of[job_id]
    ]
    return min((t for t in [*lost, *over] if t is not None and t > ledger.now_s), default=None)
