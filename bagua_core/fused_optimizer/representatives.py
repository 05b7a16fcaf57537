"""What stands for blocks that are alike while a step is recorded, so that nothing of the script's changes?"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

from bagua_core.fused_optimizer.block import State
from bagua_core.fused_optimizer.recording import NotRecordable
from bagua_core.fused_optimizer.stand_in import OF_THE_SCRIPT, StandIn

ELEMENTS = 5  # of a representative; no dimension that something else is likely to have
ELEMENTS_OF_A_PROOF = 4099  # a few tiles, and a rest that fills no vector


class Once:
    """In the place of a closure that has been called: it gives that loss, and must not be asked for another."""

    def __init__(self, loss: Any) -> None:
        self._loss = [loss]

    def __call__(self) -> Any:
        if not self._loss:
            raise NotRecordable("it calls its closure several times a step")
        return self._loss.pop()


def is_elementwise(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0


def small_one(flat: Tensor, state: State) -> tuple[torch.nn.Parameter, State]:
    """A parameter of a few elements with a gradient, in a state that shares what `state` does."""
    parameter = torch.nn.Parameter(torch.full((ELEMENTS,), 0.5, dtype=flat.dtype, device=flat.device))
    parameter.grad = torch.full_like(parameter, 0.25)
    own: State = {}
    for name, value in state.items():
        if is_elementwise(value):
            own[name] = torch.full((ELEMENTS,), 1, dtype=value.dtype, device=value.device)
        else:
            own[name] = value.detach().clone() if isinstance(value, Tensor) else value
    return parameter, own


def random_one(flat: Tensor, state: State) -> tuple[torch.nn.Parameter, State]:
    """As small_one, of many elements, of all magnitudes; states are not negative, as some must be."""
    generator = torch.Generator().manual_seed(len(state))

    def drawn(dtype: torch.dtype) -> Tensor:
        values = torch.randn(ELEMENTS_OF_A_PROOF, generator=generator)
        return (values * 10.0 ** torch.empty_like(values).uniform_(-6, 2, generator=generator)).to(dtype)

    parameter, own = small_one(flat, state)
    parameter = torch.nn.Parameter(drawn(flat.dtype).to(flat.device))
    parameter.grad = drawn(flat.dtype).to(flat.device)
    parameter.grad[::17] = 0.0
    for name, value in state.items():
        if is_elementwise(value):
            own[name] = drawn(value.dtype).abs().to(flat.device)
    return parameter, own


def detach_from_script(stand_in: StandIn) -> None:
    """What a trial run changes in place must not be the script's."""
    attributes = vars(stand_in.optimizer)
    for name, value in attributes.items():
        if name not in OF_THE_SCRIPT:
            attributes[name] = _copied(value)
    for name, value in stand_in.optimizer.state.items():
        stand_in.optimizer.state[name] = _copied(value)
    for group in stand_in.optimizer.param_groups:
        group.update({name: _copied(value) for name, value in group.items() if name != "params"})


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    return copy.copy(value) if isinstance(value, (dict, list, set)) else value
