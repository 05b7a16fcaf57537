"""Small trainings whose state is captured, restored and compared, in the form that travels too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from bagua_core.elastic.state import state_codec
from bagua_core.elastic.state.state_registry import StateRegistry


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.norm = nn.BatchNorm1d(6)
        self.last = nn.Linear(6, 2)
        self.register_buffer("mask", torch.ones(3, dtype=torch.bool), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.last(torch.relu(self.norm(self.first(x))))
        return result


OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "sgd": lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9, nesterov=True),
    "adam": lambda m: torch.optim.Adam(m.parameters(), lr=0.01),
    "adamw-amsgrad": lambda m: torch.optim.AdamW(m.parameters(), lr=0.01, amsgrad=True),
    "adagrad": lambda m: torch.optim.Adagrad(m.parameters(), lr=0.1),
    "groups": lambda m: torch.optim.SGD(
        [
            {"params": [p]} if p.dim() > 1 else {"params": [p], "lr": 0.5, "momentum": 0.5}
            for p in m.parameters()
        ],
        lr=0.1,
    ),
}


class Training:
    """One worker's model, optimizer, scheduler and scaler, all in its registry."""

    def __init__(self, optimizer: str, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = Net()
        self.optimizer = OPTIMIZERS[optimizer](self.model)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 20)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
        self.registry = StateRegistry()
        self.registry.add_model(self.model, [self.optimizer])
        self.registry.register("scheduler", self.scheduler)
        self.registry.register("scaler", self.scaler)

    def train(self, steps: int, seed: int) -> None:
        data = torch.Generator().manual_seed(seed)
        for _ in range(steps):
            self.optimizer.zero_grad()
            loss = self.model(torch.randn(8, 4, generator=data)).square().mean()
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.scheduler.step()


def wire_form(state: dict[str, Any]) -> tuple[bytes, bytes]:
    """Two states of the same wire form are equal, bit for bit."""
    manifest, tensors = state_codec.encode(state)
    run = torch.empty(tensors.size_bytes, dtype=torch.uint8)
    tensors.read(0, run)
    return manifest, run.numpy().tobytes()


def through_the_wire(state: dict[str, Any]) -> dict[str, Any]:
    manifest, run = wire_form(state)
    received: dict[str, Any] = state_codec.decode(
        manifest, torch.frombuffer(bytearray(run), dtype=torch.uint8)
    )
    return received


class Nested:
    """A state with containers that the script goes on changing."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {
            "list": [1, [2]],
            "tuple": (1, [3]),
            "tensor": torch.ones(2),
            "set": {1},
        }

    def state_dict(self) -> dict[str, Any]:
        return self.values

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.values = state


# -- what the script changes by itself


class Odd(nn.Module):
    """Changes much of itself in each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.encoder = nn.Linear(3, 3).requires_grad_(False)
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("late", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count = self.count + 1
        if self.late is None:
            self.late = torch.ones(2)
        for momentum, parameter in zip(self.encoder.parameters(), self.layer.parameters(), strict=True):
            momentum.data = momentum.data * 0.9 + parameter.data * 0.1
        result: torch.Tensor = self.layer(x) + self.encoder(x)
        return result


def odd(watches: bool = True) -> tuple[Odd, torch.optim.Optimizer, StateRegistry]:
    torch.manual_seed(1)
    model = Odd()
    optimizer = torch.optim.SGD(model.layer.parameters(), lr=0.1)
    registry = StateRegistry()
    registry.watches = watches
    registry.add_model(model, [optimizer])
    return model, optimizer, registry


def clamp(model: Odd) -> None:
    model.layer.weight.data.clamp_(-0.01, 0.01)  # no version counter sees it


def shrink(model: Odd) -> None:
    with torch.no_grad():
        model.layer.bias.mul_(0.5)
