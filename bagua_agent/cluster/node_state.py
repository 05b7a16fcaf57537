"""Says in which state a node is, and what its slots are used for. Pure.

Commands, pages and metrics use the same words.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import Enum

from bagua_agent.cluster.cluster_view import NodeView


class NodeState(Enum):
    """The state of a node. absent: its daemon's key is gone. trouble: the daemon found a fault. drained: a person wants
    no jobs there."""

    READY = "ready"
    TROUBLE = "trouble"
    DRAINED = "drained"
    ABSENT = "absent"


class SlotUse(Enum):
    """The present use of a slot; free ones count by the state of their node."""

    USED = "used"
    FREE = "free"
    DRAINED = "drained"
    TROUBLE = "trouble"
    ABSENT = "absent"


_FREE_ON: Mapping[NodeState, SlotUse] = {
    NodeState.READY: SlotUse.FREE,
    NodeState.DRAINED: SlotUse.DRAINED,
    NodeState.TROUBLE: SlotUse.TROUBLE,
}


def state_of(node: NodeView) -> NodeState:
    """Returns the state of a node. A fault goes before a drain: it is what has to be mended."""
    if not node.present:
        return NodeState.ABSENT
    if node.troubles:
        return NodeState.TROUBLE
    return NodeState.READY if node.drain is None else NodeState.DRAINED


def taken_slots(node: NodeView) -> int:
    """Returns the number of slots that units have, by the node's own report."""
    return sum(len(unit.slots) for unit in node.units if unit.alive)


def slot_uses(nodes: Iterable[tuple[NodeState, int, int]]) -> dict[SlotUse, int]:
    """Returns the number of slots of each use; they add up to all slots. nodes: state, slots, slots that units have."""
    found = dict.fromkeys(SlotUse, 0)
    for state, slots, taken in nodes:
        if state is NodeState.ABSENT:
            found[SlotUse.ABSENT] += slots
            continue
        used = min(taken, slots)
        found[SlotUse.USED] += used
        found[_FREE_ON[state]] += slots - used
    return found
