"""Finds the orders in force on a node, and explains why an order ends or a job should leave the node."""

from __future__ import annotations

from bagua_agent.cluster.cluster_policy import ClusterPolicy
from bagua_agent.cluster.cluster_view import ClusterView, NodeView, OrderView, UnitState, UnitView
from bagua_agent.cluster.node_trouble import is_lost, why_left_out


def in_force(view: ClusterView, node_name: str) -> tuple[OrderView, ...]:
    """Returns the orders of the node's key. Without a key it returns orders for what the node runs, since absence ends
    nothing and it must have been ordered once.

    A daemon that was started again with another node name finds its units under the new one. Their orders are in force
    there, and no longer under the name that is gone: a job does not hold one unit twice.
    """
    node = view.node(node_name)
    if node_name in view.orders:
        orders = view.orders[node_name]
        return orders if node.present or not orders else _not_renamed(view, node, orders)
    running = [u for u in node.units if u.state is UnitState.RUNNING] if node.present else []
    return tuple(OrderView(u.job_id, len(u.slots), u.order) for u in running)


def _not_renamed(view: ClusterView, gone: NodeView, orders: tuple[OrderView, ...]) -> tuple[OrderView, ...]:
    """Returns those of an absent node's orders whose unit does not run under another name: on a node without a key, of
    the same boot, which no unit outlives."""
    elsewhere = {
        (u.job_id, u.order, len(u.slots))
        for name, node in view.nodes.items()
        if node.present and name not in view.orders and gone.boot_id and node.boot_id == gone.boot_id
        for u in node.units
        if u.state is UnitState.RUNNING
    }
    return tuple(o for o in orders if (o.job_id, o.number, o.slots) not in elsewhere)


def why_over(
    order: OrderView, node: NodeView, unit: UnitView | None, now_s: float, policy: ClusterPolicy
) -> str:
    """Returns why the job has nothing more to expect from this node, so that its order goes at once; empty: it may
    have."""
    if is_lost(node, now_s, policy):
        return f"{node.node_name} is lost"
    if node.drain is not None and node.drain.force:
        return f"{node.node_name} is drained by force{_because(node.drain.reason)}"
    left_out = why_left_out(unit, policy)
    if left_out:
        return f"{node.node_name} is left out ({left_out})"
    if node.present and order.slots > node.slots and not (unit and unit.alive):
        return f"{node.node_name} has only {node.slots} slots"
    return ""


def why_leave(node: NodeView) -> str:
    """Returns why no job should be on this node, though one that needs it may stay until it is replaced; empty: it is
    fine."""
    if node.drain is not None:
        return f"{node.node_name} is drained{_because(node.drain.reason)}"
    if node.troubles:
        return f"{node.node_name} is in trouble ({'; '.join(node.troubles)})"
    return ""


def _because(reason: str) -> str:
    return f" ({reason})" if reason else ""
