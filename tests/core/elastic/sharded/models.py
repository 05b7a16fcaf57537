"""A small model that fully_shard divides unevenly, and the optimizers that it is trained with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from bagua_core.elastic.state.state_registry import StateRegistry


class Block(nn.Module):
    """One parameter of its own, a layer with 5 rows, a norm with buffers, and an output of a single row."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))
        self.first = nn.Linear(3, 5)
        self.norm = nn.BatchNorm1d(5)
        self.last = nn.Linear(5, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.last(torch.relu(self.norm(self.first(x * self.scale))))
        return result


OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "sgd": lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9),
    "adam": lambda m: torch.optim.Adam(m.parameters(), lr=0.01, foreach=False),
    "adamw": lambda m: torch.optim.AdamW(m.parameters(), lr=0.01, foreach=True, amsgrad=True),
    "adamw-fused": lambda m: torch.optim.AdamW(m.parameters(), lr=0.01, fused=True),
    "muon": lambda m: torch.optim.Muon([m.first.weight], lr=0.01),
}


class Training:
    """One rank's sharded model and optimizer, in its registry. shards 0: a plain model, the same values."""

    def __init__(
        self, optimizer: str = "adamw", seed: int = 0, mesh: DeviceMesh | None = None, sharded: bool = True
    ):
        torch.manual_seed(seed)
        self.model = Block()
        if sharded:
            mesh = mesh or init_device_mesh("cpu", (dist.get_world_size(),))
            for layer in (self.model.first, self.model.last):
                fully_shard(layer, mesh=mesh)
            fully_shard(self.model, mesh=mesh)
        self.optimizer = OPTIMIZERS[optimizer](self.model)
        self.registry = StateRegistry()
        self.registry.watches = True
        self.registry.add_model(self.model, [self.optimizer])

    def backward(self, seed: int) -> None:
        data = torch.randn(8, 3, generator=torch.Generator().manual_seed(seed))
        self.model(data).square().mean().backward()

    def train(self, steps: int, seed: int = 0) -> None:
        for step in range(steps):
            self.optimizer.zero_grad()
            self.backward(seed + step)
            self.optimizer.step()

    def tensors(self) -> dict[str, torch.Tensor]:
        """Copies of the local tensors of parameters, buffers and the optimizer's state."""
        found = {n: t for n, t in self.registry.models[0].everything().items()}
        for key, values in self.optimizer.state_dict()["state"].items():
            found |= {f"{key}.{n}": v for n, v in values.items() if isinstance(v, torch.Tensor)}
        return {n: _local(t).clone() for n, t in found.items()}


def _local(tensor: Any) -> torch.Tensor:
    found: torch.Tensor = tensor.detach()
    return found.to_local() if isinstance(found, DTensor) else found


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(a[n].dtype == b[n].dtype and torch.equal(a[n], b[n]) for n in a)


class LocalMomentum(torch.optim.Optimizer):
    """Keeps its state as plain tensors of each shard, as an optimizer that works on local tensors does."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                momentum = self.state[p].setdefault("momentum", torch.zeros_like(_local(p)))
                momentum.mul_(0.9).add_(_local(p.grad))
                _local(p).sub_(momentum, alpha=group["lr"])


class WithItsOwn(Training):
    """The optimizer has plain tensors on each shard, and an algorithm, if it has one, a tensor of another size on
    each."""

    def __init__(self, rank: int, seed: int, algorithm: bool) -> None:
        super().__init__("sgd", seed)
        self.optimizer = LocalMomentum(self.model.parameters())
        self.own = {"own": torch.full((3 + rank,), float(seed))} if algorithm else {}
        self.registry = StateRegistry()
        self.registry.add_model(self.model, [self.optimizer], travelling=lambda: self.own)
