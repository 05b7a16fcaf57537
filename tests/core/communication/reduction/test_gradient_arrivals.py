"""The order in which a backward brings the gradients is measured once a generation."""

from __future__ import annotations

import torch
from torch import nn

from bagua_core.communication.reduction.arrivals import WATCHED
from bagua_core.communication.reduction.reducer import Reducer
from tests.core.communication.worlds import FakeEngine


class Backwards(nn.Module):
    """Uses its layers in the reverse of the order in which it registers them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(2, 2, bias=False) for _ in range(3)])

    def forward(self, x: torch.Tensor, layers: int = 3) -> torch.Tensor:
        for layer in list(reversed(self.layers))[:layers]:
            x = layer(x)
        return x.sum()


def test_the_order_of_a_model_that_registers_otherwise_than_it_computes() -> None:
    model = Backwards()
    reducer = Reducer(model.parameters(), FakeEngine(None))
    assert reducer.readiness == ()
    for _ in range(WATCHED):
        assert reducer.readiness == ()
        model(torch.ones(1, 2)).backward()
    assert reducer.readiness == (0, 1, 2), "the layer that is used last is ready first"


def test_a_backward_without_some_parameters_says_nothing() -> None:
    model = Backwards()
    reducer = Reducer(model.parameters(), FakeEngine(None))
    for _ in range(WATCHED):
        model(torch.ones(1, 2), layers=2).backward()
    assert reducer.readiness == ()
    reducer.communicator_changed()
    for _ in range(WATCHED):
        model(torch.ones(1, 2)).backward()
    assert reducer.readiness == (0, 1, 2), "it is measured again in each generation"
