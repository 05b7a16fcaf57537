"""What a step may read from attributes that a script sets on parameters takes effect as without blocks."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from bagua_core.fused_optimizer import fuse_optimizer
from tests.core.fused_optimizer.twins import quietly, small_net, step_of


class Scaled(torch.optim.Optimizer):
    """SGD with momentum, whose rate each parameter scales."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    speed = self.state[p].setdefault("speed", torch.zeros_like(p)).mul_(0.9).add_(p.grad)
                    p.add_(speed, alpha=-group["lr"] * getattr(p, "lr_scale", 1.0))


def train(net: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 2) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        net(torch.ones(2, 6)).sum().backward()
        optimizer.step()


def fused_members(optimizer: torch.optim.Optimizer) -> int:
    """Parameters that its last step took in blocks."""
    layout = step_of(optimizer).layout
    return 0 if layout is None else sum(len(block.members) for block in layout.blocks)


def twins(
    make: Callable[[Any], torch.optim.Optimizer] = Scaled,
) -> tuple[nn.Module, torch.optim.Optimizer, nn.Module, torch.optim.Optimizer]:
    """A net and its optimizer, and another of the same values."""
    net = small_net()
    other = copy.deepcopy(net)
    return net, make(net.parameters()), other, make(other.parameters())


@pytest.mark.parametrize("strict", [False, True])
def test_an_attribute_that_a_step_reads_takes_effect(strict: bool) -> None:
    net, optimizer, other, fused = twins()
    for each in (net, other):
        next(each.parameters()).lr_scale = 0.0  # type: ignore[attr-defined]
    with pytest.warns(UserWarning, match="attributes.*lr_scale"):
        fuse_optimizer(fused, strict=strict)
    frozen = next(other.parameters()).detach().clone()
    train(net, optimizer)
    train(other, fused)
    assert torch.equal(next(other.parameters()), frozen)
    assert all(map(torch.equal, net.parameters(), other.parameters()))
    assert fused_members(fused) == len(list(net.parameters())) - 1


def test_an_attribute_that_is_set_later_takes_effect() -> None:
    net, optimizer, other, fused = twins()
    fuse_optimizer(fused)
    for each, its in ((net, optimizer), (other, fused)):
        train(each, its)
        next(each.parameters()).lr_scale = 0.5  # type: ignore[attr-defined]
        train(each, its)
    assert all(map(torch.equal, net.parameters(), other.parameters()))


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (Scaled, "_is_hf_initialized"),
        (Scaled, "tensor_model_parallel"),
        (lambda p: torch.optim.SGD(p, 0.1, momentum=0.9), "lr_scale"),
    ],
)
def test_marks_that_no_step_reads_keep_nothing_out_of_a_block(make: Any, name: str) -> None:
    net, _, _, _ = twins()
    for parameter in net.parameters():
        setattr(parameter, name, True)
    optimizer = make(net.parameters())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fuse_optimizer(optimizer, strict=True)
    quietly(lambda: train(net, optimizer, 3))
    assert fused_members(optimizer) == len(list(net.parameters()))
