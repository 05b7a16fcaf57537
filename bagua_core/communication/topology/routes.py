"""Chooses the ranks and lanes over which a bucket travels. Pure but for the communicators it returns."""

from __future__ import annotations

from dataclasses import dataclass

from bagua_core.communication.communicator import Communicator, Lane

FIRST_OF_NODE = 0
"""The rank within its node's lane of the worker that represents it in LEADERS."""


@dataclass(frozen=True, slots=True)
class Route:
    """The lanes over which a bucket travels.

    node: the workers of this rank's node, whose buckets are summed there first; None: there is no such stage.
    across: those between whom sums are exchanged; None: another worker of the node does that.
    parties: how many those are; 1: there is nothing to exchange but within a node.
    """

    node: Communicator | None
    across: Communicator | None
    parties: int


def lanes_for(hierarchical: bool) -> frozenset[Lane]:
    """Returns the lanes that route_of may return."""
    return frozenset({Lane.NODE, Lane.LEADERS}) if hierarchical else frozenset()


def route_of(communicator: Communicator, hierarchical: bool) -> Route:
    """Returns the route of a bucket; all ranks come to the same kind of route. There are stages only where some node
    has several workers and there is more than one node; within a single one there is nothing to spare. A transport that
    knows no nodes has one worker on each."""
    nodes = communicator.nodes
    if not hierarchical or all(len(ranks) == 1 for ranks in nodes):
        return Route(None, communicator, communicator.world_size)
    if len(nodes) == 1:
        return Route(None, communicator, 1)
    return Route(communicator.lanes[Lane.NODE], communicator.lanes.get(Lane.LEADERS), len(nodes))
