"""What a member tells the others of its state when it enters a generation."""

from __future__ import annotations

import torch
from torch import nn

from bagua_contract.records import StateName
from bagua_core.elastic.step.engine import Engine


def member(equal_states: bool = True, dtype: torch.dtype = torch.float32) -> Engine:
    engine = Engine(None)
    model = nn.Linear(3, 2).to(dtype)
    engine.registry.add_model(model, [torch.optim.SGD(model.parameters())], equal_states=equal_states)
    return engine


def test_a_holder_tells_the_digest_of_its_layout() -> None:
    """By it the others know whether they may take stripes of one state from several holders."""
    engine, other, wider = member(), member(), member(dtype=torch.float64)
    for holder in (engine, other, wider):
        holder.state.name = StateName(2, 5, 0)
    told = engine.info().layout
    assert told and told == engine.state.layout() == other.info().layout
    assert wider.info().layout not in (0, told)


def test_one_without_the_state_or_with_replicas_that_differ_tells_none() -> None:
    assert member().info().layout == 0
    unequal = member(equal_states=False)
    unequal.state.name = StateName(2, 5, 0)
    assert unequal.info().layout == 0
