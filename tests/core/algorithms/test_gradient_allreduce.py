"""The plain mean, node by node: one bucket a node crosses the network."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from bagua_core.algorithms import GradientAllreduce
from bagua_core.communication.communicator import Lane
from tests.core.algorithms.gradient_ranks import Rank, assert_equal_bits, break_at, exact, world_on_nodes
from tests.core.communication.worlds import in_process_world, run_ranks


@pytest.mark.parametrize("nodes", [[2, 2], [1, 3], [3], [1, 1]], ids=str)
def test_the_mean_over_nodes(nodes: list[int]) -> None:
    world = world_on_nodes(nodes)
    crossing: list[str] = []
    for communicator in world:
        for lane in (communicator, *communicator.lanes.values()):
            name = "main" if lane is communicator else "lane"

            def noted(*args: Any, _real: Any = lane.allreduce, _name: str = name) -> Any:
                crossing.append(_name)
                return _real(*args)

            lane.allreduce = noted  # type: ignore[method-assign]
    members = [Rank(c, GradientAllreduce(hierarchical=True)) for c in world]
    assert members[0].model.lanes == {Lane.NODE, Lane.LEADERS}

    def act(r: Rank) -> None:
        for v in (1.0, 0.0):
            r.engine.v = v
            r.backward()

    run_ranks(members, act)
    assert_equal_bits([m.gradients() for m in members])
    mean, _ = exact(Rank(None, GradientAllreduce()), len(world))
    for got, want in zip(members[0].gradients(), mean, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-6)
    assert all(m.engine.pairs == [(float(len(world)),) * 2, (0.0, 0.0)] for m in members)
    stages = len(nodes) > 1 and max(nodes) > 1
    assert set(crossing) == {"lane" if stages else "main"}


@pytest.mark.parametrize("what", ["reduce", "allreduce", "broadcast"])
def test_nothing_is_left_of_a_step_that_broke(what: str) -> None:
    world = world_on_nodes([2, 1])
    members = [Rank(c, GradientAllreduce(hierarchical=True)) for c in world]
    before = members[0].parameters()
    happened = break_at(world, what, 1)
    assert not any(run_ranks(members, lambda r: r.step()))
    assert happened.is_set()
    assert_equal_bits([before, *(m.parameters() for m in members)])
    steady = [Rank(c, GradientAllreduce(hierarchical=True)) for c in in_process_world(3)]
    for member, communicator in zip(members, in_process_world(3, 2), strict=True):
        member.move_to(communicator)
    for several in (members, steady):
        assert all(run_ranks(several, lambda r: r.step()))
    assert_equal_bits([m.parameters() for m in [*members, *steady]])
