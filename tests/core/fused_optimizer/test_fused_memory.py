"""Whose memory a fused optimizer moves, and whose it leaves."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from bagua_core.fused_optimizer import fuse_optimizer
from tests.core.fused_optimizer.fused_makes import adam
from tests.core.fused_optimizer.twins import Twins, shapes_net, step_of

# -- memory


def flat_views(count: int) -> tuple[Tensor, list[nn.Parameter]]:
    flat = torch.randn(5 * count)
    return flat, [nn.Parameter(flat[5 * i : 5 * i + 5]) for i in range(count)]


def test_parameters_that_lie_in_one_memory_already_stay_there() -> None:
    flat, parameters = flat_views(4)
    optimizer = fuse_optimizer(adam(parameters))
    for _ in range(2):
        for p in parameters:
            p.grad = torch.ones(5)
        optimizer.step()
    (block,) = step_of(optimizer).layout.blocks
    assert block.whole.data_ptr() == flat.data_ptr()
    assert torch.equal(flat, torch.cat([p.detach() for p in parameters]))


@pytest.mark.parametrize("who", ["a larger memory", "a view", "another process"])
def test_memory_that_something_else_looks_at_is_not_left(who: str) -> None:
    """What looks at it goes on seeing what the step wrote."""
    if who == "a larger memory":
        flat, all_of_it = flat_views(6)
        parameters = all_of_it[::2]  # in it, but not one after the other
        views = [flat[10 * i : 10 * i + 5] for i in range(3)]
    else:
        parameters = [nn.Parameter(torch.randn(5)) for _ in range(3)]
        if who == "another process":
            for p in parameters:
                p.share_memory_()
        views = [p.detach() for p in parameters]
    optimizer = fuse_optimizer(adam(parameters))
    for _ in range(3):
        for p in parameters:
            p.grad = torch.ones(5)
        optimizer.step()
    assert all(map(torch.equal, views, parameters))
    assert step_of(optimizer).layout.blocks == []


def test_do_flatten_false_moves_nothing() -> None:
    twins = Twins(adam, shapes_net, do_flatten=False)
    pointers = [p.data_ptr() for p in twins.models[1].parameters()]
    twins.train(2)
    assert [len(b.members) for b in twins.blocks] == [1], "the large one is cut where it lies"
    twins.train(2)
    twins.check()
    assert pointers == [p.data_ptr() for p in twins.models[1].parameters()]


def test_parameters_that_get_other_memory_are_found() -> None:
    twins = Twins(adam)
    twins.train(2)
    for model in twins.models:
        for p in list(model.parameters())[2:6]:
            p.data = p.data.clone()
    twins.train(2)
    twins.check()
    for model, optimizer in twins.pairs():
        model.double()
        for state in optimizer.state.values():
            state.update({name: t.double() for name, t in state.items() if t.dim()})
    twins.dtype = torch.float64
    twins.train(2)
    twins.check()
    assert len(twins.blocks) == 1
