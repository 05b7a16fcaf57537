"""The call before a backward adds to gradients: once a backward, whatever a forward returns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from bagua_core.elastic.step.engine import Engine
from bagua_core.model.backward_begin import announce_backward
from bagua_core.parallel import DistributedDataParallel


@dataclass
class Output:
    loss: torch.Tensor
    logits: torch.Tensor


@pytest.mark.parametrize(
    "shape",
    [lambda y: y, lambda y: [y], lambda y: {"y": (y,)}, lambda y: Output(y.sum(), y)],
    ids=["tensor", "list", "dict of tuple", "dataclass"],
)
def test_it_comes_before_the_first_gradient(shape: Any) -> None:
    layer = nn.Linear(2, 2)
    found: list[object] = []
    result = layer(torch.ones(1, 2))
    announce_backward(shape(result), lambda: found.append(layer.weight.grad))
    assert found == []
    result.sum().backward()
    assert found and all(grad is None for grad in found)


def test_without_a_result_that_is_known_it_comes_at_once() -> None:
    found: list[int] = []
    announce_backward(object(), lambda: found.append(1))
    announce_backward(None, lambda: found.append(2))
    assert found == [1, 2]


def test_a_parameter_that_is_returned_keeps_no_hook() -> None:
    """It outlives the step, and a hook of each forward would stay on it."""
    parameter = nn.Parameter(torch.ones(2))
    for _ in range(3):
        announce_backward((parameter, parameter * 2), lambda: None)
    assert not parameter._backward_hooks


class Both(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.generator, self.critic = nn.Linear(3, 3), nn.Linear(3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.critic(self.generator(x))
        return result


def critic_of(wrapped: bool) -> torch.Tensor:
    torch.manual_seed(0)
    both, x = Both(), torch.randn(5, 3)
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.1) for part in (both.critic, both.generator)]
    engine = Engine(None)
    model: nn.Module = DistributedDataParallel(both, optimizers, engine=engine) if wrapped else both
    before = both.critic.weight.detach().clone()
    for _ in range(2):
        if wrapped:
            engine.next_step()
        for optimizer in optimizers:
            optimizer.zero_grad()
        for trained, frozen in ((both.critic, both.generator), (both.generator, both.critic)):
            trained.requires_grad_(True)
            frozen.requires_grad_(False)
            model(x).sum().backward()
        for optimizer in optimizers:
            optimizer.step()
    assert not torch.equal(both.critic.weight, before)
    return both.critic.weight.detach()


def test_parameters_frozen_between_two_backwards_keep_their_gradients() -> None:
    """Adversarial training with both models in one module."""
    assert torch.equal(critic_of(wrapped=True), critic_of(wrapped=False))
