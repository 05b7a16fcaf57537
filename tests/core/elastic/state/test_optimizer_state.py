"""An optimizer's state comes back in the data types it had, whatever load_state_dict makes of it."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from torch import nn

from bagua_core.elastic.heal import received_state
from bagua_core.elastic.state import optimizer_state, state_codec
from bagua_core.elastic.state.optimizer_state import OptimizerStateMismatch


class WithMaster(torch.optim.Optimizer):
    """Plain descent on float32 copies of the parameters, with a list among its state."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["master"] = p.detach().float()
                    state["history"] = [torch.zeros_like(state["master"])]
                state["master"].sub_(group["lr"] * p.grad.float())
                state["history"][0].add_(1e-3)
                p.copy_(state["master"])


class Rounding(WithMaster):
    """Its load_state_dict does to the state what it likes."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self.rounds = True

    def state_dict(self) -> dict[str, Any]:
        found = super().state_dict()
        if getattr(self, "rounds", False):
            for values in found["state"].values():
                values["master"] = values["master"].to(torch.float16)
        return found


def trained(
    kind: Any, dtype: torch.dtype, steps: int, seed: int = 1
) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Linear(5, 3).to(dtype)
    optimizer = kind(model.parameters())
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(4, 5, dtype=dtype)).square().mean().backward()
        optimizer.step()
    return model, optimizer


def through_staging(state: Any) -> Any:
    manifest, tensors = state_codec.encode(state)
    staging = received_state.Staging()
    staging.open(manifest, tensors.size_bytes)
    chunk = staging.chunk(0, tensors.size_bytes)
    tensors.read(0, chunk)
    staging.put(0, chunk)
    return staging.state()


def layout(state_dict: dict[str, Any]) -> list[Any]:
    manifest, tensors = state_codec.encode(state_dict)
    return [manifest, [t.tolist() for t in tensors]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "kind",
    [torch.optim.NAdam, torch.optim.ASGD, torch.optim.RAdam, torch.optim.Adam, torch.optim.LBFGS, WithMaster],
    ids=lambda kind: kind.__name__,
)
def test_every_value_comes_back_bit_for_bit(kind: Any, dtype: torch.dtype) -> None:
    if kind is torch.optim.LBFGS:
        _, optimizer = trained(torch.optim.SGD, dtype, 0)
        model = nn.Linear(5, 3).to(dtype)
        optimizer = kind(model.parameters(), max_iter=3)

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(torch.ones(4, 5, dtype=dtype)).square().mean()
            loss.backward()
            return loss

        optimizer.step(closure)
    else:
        _, optimizer = trained(kind, dtype, 3)
    _, other = trained(torch.optim.SGD, dtype, 0, seed=2)
    other = kind([p for group in other.param_groups for p in group["params"]])
    optimizer_state.load(other, through_staging(optimizer.state_dict()))
    assert layout(other.state_dict()) == layout(optimizer.state_dict())


def test_a_healed_state_can_be_saved() -> None:
    """torch.save refuses tensors of several data types in one storage."""
    _, optimizer = trained(torch.optim.NAdam, torch.bfloat16, 3)
    _, other = trained(torch.optim.NAdam, torch.bfloat16, 0)
    optimizer_state.load(other, through_staging(optimizer.state_dict()))
    file = io.BytesIO()
    torch.save(other.state_dict(), file)
    file.seek(0)
    assert layout(torch.load(file)) == layout(optimizer.state_dict())


def test_an_optimizer_that_does_not_take_its_state_is_named() -> None:
    _, optimizer = trained(WithMaster, torch.bfloat16, 2)
    _, other = trained(Rounding, torch.bfloat16, 2)
    with pytest.raises(
        OptimizerStateMismatch, match=r"Rounding.load_state_dict changed .*master.* from torch.float32"
    ):
        optimizer_state.load(other, optimizer.state_dict())


def test_a_group_that_was_added_later_is_named() -> None:
    _, optimizer = trained(torch.optim.AdamW, torch.float32, 1)
    _, other = trained(torch.optim.AdamW, torch.float32, 0)
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    with pytest.raises(
        OptimizerStateMismatch, match=r"groups of \[2, 1\] parameters, this one of \[2\].*all of its"
    ):
        optimizer_state.load(other, optimizer.state_dict())
