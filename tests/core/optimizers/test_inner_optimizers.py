"""The state of an optimizer that another one steps is the job's, and their groups stay common."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from bagua_core.elastic.step.engine import Engine
from bagua_core.optimizers.inner_optimizers import with_inner
from bagua_core.parallel import DistributedDataParallel
from tests.core.communication.worlds import seeded
from tests.core.elastic.state.trainings import through_the_wire


class Around(torch.optim.Optimizer):
    """As SAM: steps a base optimizer, whose groups it shares, and whose state it does not save."""

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, {"rho": 0.1, **options})
        self.base = torch.optim.SGD(self.param_groups, **options)
        self.param_groups = self.base.param_groups

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.base.step()

    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict(state_dict)
        self.base.param_groups = self.param_groups


class Delegates(Around):
    """Has the state of its base optimizer for its own."""

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, **options)
        self.state = self.base.state

    def load_state_dict(self, state_dict: Any) -> None:
        self.base.load_state_dict(state_dict)
        self.state, self.param_groups = self.base.state, self.base.param_groups


class Worker:
    def __init__(self, kind: type[Around] = Around) -> None:
        self.engine = Engine(None)
        self.net = seeded(lambda: nn.Linear(3, 2))
        self.optimizer = kind(self.net.parameters(), lr=0.1, momentum=0.9)
        self.model = DistributedDataParallel(self.net, [self.optimizer], engine=self.engine)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, 0.5)

    def train(self, steps: int) -> None:
        for step in range(steps):
            self.optimizer.zero_grad()
            self.model(torch.full((1, 3), 1.0 + step)).square().sum().backward()
            self.optimizer.step()
            self.scheduler.step()

    @property
    def weight(self) -> torch.Tensor:
        return next(self.net.parameters()).detach().clone()


@pytest.mark.parametrize("kind", [Around, Delegates])
def test_a_copy_of_the_state_has_the_inner_ones_and_goes_on_alike(kind: type[Around]) -> None:
    holder, joiner = Worker(kind), Worker(kind)
    holder.train(3)
    joiner.engine.registry.restore(through_the_wire(copy.deepcopy(holder.engine.registry.capture())))
    joiner.scheduler.load_state_dict(holder.scheduler.state_dict())
    assert joiner.optimizer.base.param_groups is joiner.optimizer.param_groups
    assert joiner.optimizer.base.param_groups[0]["lr"] == 0.05
    for worker in (holder, joiner):
        worker.train(3)
    assert joiner.optimizer.base.param_groups[0]["lr"] == 0.0125
    assert torch.equal(joiner.weight, holder.weight)


def test_one_with_the_state_of_another_is_found_once() -> None:
    parameters = [nn.Parameter(torch.ones(1))]
    around, delegates = Around(parameters, lr=0.1), Delegates(parameters, lr=0.1)
    assert with_inner([around]) == [around, around.base]
    assert with_inner([around.base, around, around]) == [around.base, around]
    assert with_inner([delegates]) == [delegates]
    around.others = {"more": [delegates, around]}  # type: ignore[attr-defined]
    assert with_inner([around]) == [around, around.base]
    around.others = [delegates]  # type: ignore[attr-defined]
    assert with_inner([around]) == [around, around.base, delegates]


def test_it_goes_with_the_model_that_it_came_with() -> None:
    worker = Worker()
    registry = worker.engine.registry
    assert registry.optimizers == [worker.optimizer, worker.optimizer.base]
    worker.model.detach()
    assert not registry.optimizers
