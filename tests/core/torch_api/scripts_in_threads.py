"""Scripts without agents: an engine whose steps begin and end as the real one's do, for ranks that are threads."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import nn

from bagua_core.communication.communicator import CollectiveFailed, Communicator
from bagua_core.communication.step_interface import MicroBatch, Model
from bagua_core.elastic.state.state_registry import StateRegistry
from bagua_core.elastic.step.engine import Engine
from bagua_core.torch_api.loop_steps import LoopSteps
from bagua_core.torch_api.script_world import Script, ScriptWorld
from tests.core.communication.worlds import FakeEngine


class LoopEngine(FakeEngine):
    """next_step ends the step and announces another; the next forward begins it. committed, failures: counted."""

    def __init__(self, communicator: Communicator | None = None) -> None:
        super().__init__(communicator)
        self.registry = StateRegistry()
        self.in_step = False
        self.launched = False
        self.member = None
        self.committed = 0
        self.failures: list[Exception] = []
        self._is_announced = False

    @property
    def micro_batch(self) -> MicroBatch:
        assert self.in_step, "outside a step"
        return self.current

    def attach_model(self, model: Model) -> None:
        super().attach_model(model)
        self.registry.add_model(model.module, model.optimizers, model.travelling, model.equal_states)

    def detach_model(self, model: Model) -> None:
        super().detach_model(model)
        self.registry.remove_model(model.module, [o for other in self.models for o in other.optimizers])

    def next_step(self, resumes_here: bool = True) -> int:
        if self.in_step:
            self._end_step()
        self._is_announced = True
        return self.committed

    def _end_step(self) -> None:
        self.in_step = False
        if self.failed is not None:
            self.failures.append(self.failed)
            self.registry.roll_back()
        else:
            self.committed = self.step = self.committed + 1
        for model in self.models:
            if self.failed is None:
                model.step_committed()
            else:
                model.step_rolled_back()
        self.failed = None

    def forward_begins(self) -> None:
        if self._is_announced and not self.in_step:
            self._is_announced, self.in_step = False, True
            self.registry.snapshot()

    def lose_the_step(self) -> None:
        self.reduction_failed(CollectiveFailed("a peer is gone"))

    def asked_place(self) -> tuple[int, int]:
        return self.place_of_script()

    def asked_size(self) -> int:
        return self.place_of_script()[1]

    def place_of_script(self) -> tuple[int, int]:
        return (0, 1) if self._communicator is None else (self._communicator.global_rank, 2)


def script(communicator: Communicator | None = None) -> tuple[LoopEngine, Script]:
    engine = LoopEngine(communicator)
    as_engine = cast(Engine, engine)
    return engine, Script(as_engine, ScriptWorld(as_engine), LoopSteps(as_engine))


class Net(nn.Module):
    """With a buffer that every training forward changes."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.norm = nn.BatchNorm1d(8)
        self.last = nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> Any:
        return self.last(self.norm(self.first(x)).relu())


def batches(count: int, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(6, 4, generator=generator) for _ in range(count)]


def weights(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1).clone() for p in model.parameters()])
