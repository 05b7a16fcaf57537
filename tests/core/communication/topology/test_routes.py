"""The stages of a bucket's route, and the nodes that take part in each."""

from __future__ import annotations

import pytest

from bagua_core.communication.communicator import Lane
from bagua_core.communication.topology.routes import Route, lanes_for, route_of
from tests.core.algorithms.gradient_ranks import world_on_nodes
from tests.core.communication.worlds import in_process_world


@pytest.mark.parametrize(
    ("nodes", "stages", "parties"),
    [
        ([1, 1, 1], False, 3),
        ([2, 2], True, 2),
        ([3, 1], True, 2),
        ([1, 1, 2], True, 3),
        ([4], False, 1),
        ([1], False, 1),
    ],
    ids=str,
)
def test_stages_only_where_they_spare_something(nodes: list[int], stages: bool, parties: int) -> None:
    world = world_on_nodes(nodes)
    firsts = {sum(nodes[:i]) for i in range(len(nodes))}
    for communicator in world:
        assert route_of(communicator, False) == Route(None, communicator, len(world))
        route = route_of(communicator, True)
        assert route.parties == parties
        if not stages:
            assert route.node is None and route.across is communicator
            continue
        assert route.node is communicator.lanes[Lane.NODE]
        assert (route.across is not None) == (communicator.global_rank in firsts)


def test_no_node_known() -> None:
    (communicator, _) = in_process_world(2)
    assert route_of(communicator, True) == Route(None, communicator, 2)
    assert lanes_for(True) == {Lane.NODE, Lane.LEADERS} and not lanes_for(False)
