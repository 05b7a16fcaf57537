"""Scalers and averages of weights in a deterministic job: their state is the job's, and counts steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import TensorDataset

from bagua_core.data.elastic_loader import ElasticDataLoader
from bagua_core.elastic.step.engine import Engine
from bagua_core.errors import NotDeterministicError
from bagua_core.parallel import DistributedDataParallel


class Script:
    """A script of a deterministic job with one worker: two steps with two shards each."""

    def __init__(self, shards: int = 2, net: nn.Module | None = None) -> None:
        self.engine = Engine(None)
        self.engine.virtual_shards = shards
        self.net = nn.Linear(2, 1) if net is None else net
        self.optimizer = torch.optim.SGD((p for p in self.net.parameters() if p.requires_grad), lr=1.0)
        self.model = DistributedDataParallel(self.net, [self.optimizer], engine=self.engine)
        self.loader = ElasticDataLoader(TensorDataset(torch.ones(16, 2)), 8, seed=0, engine=self.engine)

    def train(
        self, step: Callable[[Any], object], behind: Callable[[], object], scale: Callable[[Any], Any]
    ) -> None:
        for (x,) in self.loader:
            self.optimizer.zero_grad()
            scale(self.model(x).mean()).backward()
            step(self.optimizer)
            behind()


def train_with_scaler(script: Script, scaler: torch.amp.GradScaler) -> None:
    script.train(scaler.step, scaler.update, scaler.scale)


def train_with_average(script: Script, update: Callable[[], object]) -> None:
    script.train(lambda optimizer: optimizer.step(), update, lambda loss: loss)


def a_scaler(**more: Any) -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=16.0, growth_interval=2, **more)


@pytest.mark.parametrize("shards", [1, 2])
def test_a_scaler_that_is_not_registered_is_refused_before_the_first_step(shards: int) -> None:
    """Also on a worker with one shard, where it counts steps: what is refused does not depend on the workers."""
    script = Script(shards)
    before = [p.detach().clone() for p in script.net.parameters()]
    with pytest.raises(NotDeterministicError, match=r"^GradScaler\.step\(\) was called, .* not registered"):
        train_with_scaler(script, a_scaler())
    assert all(torch.equal(p, was) for p, was in zip(script.net.parameters(), before, strict=True))


def test_a_registered_scaler_counts_steps_and_one_that_does_nothing_is_left_alone() -> None:
    script, scaler = Script(), a_scaler()
    script.engine.register_state("scaler", scaler)
    train_with_scaler(script, scaler)
    assert scaler.get_scale() == 32.0, "two steps"
    train_with_scaler(Script(), a_scaler(enabled=False))


@pytest.mark.parametrize("registered", [False, True])
def test_an_average_that_counts_shards_is_refused(registered: bool) -> None:
    script = Script()
    average = AveragedModel(script.net, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    if registered:
        script.engine.register_state("average", average)
    with pytest.raises(
        NotDeterministicError,
        match=r"^AveragedModel\.update_parameters\(\) was called within step 0, .* and call",
    ):
        train_with_average(script, lambda: average.update_parameters(script.model))


def test_an_average_that_counts_steps_is_not_if_it_is_registered() -> None:
    for registered in (True, False):
        script = Script()
        average = AveragedModel(script.net)
        if registered:
            script.engine.register_state("average", average)

        def update(script: Script = script, average: AveragedModel = average) -> None:
            if script.loader.is_at_step_end:
                average.update_parameters(script.net)

        if registered:
            train_with_average(script, update)
            assert average.n_averaged == 2
            continue
        with pytest.raises(NotDeterministicError, match="the AveragedModel is not registered"):
            train_with_average(script, update)


def test_what_is_no_part_of_the_job_is_left_alone() -> None:
    Script()  # its job is deterministic
    net = nn.Linear(2, 1)
    optimizer, scaler = torch.optim.SGD(net.parameters(), lr=1.0), a_scaler()
    scaler.scale(net(torch.ones(2, 2)).mean()).backward()
    scaler.step(optimizer)
    torch.optim.lr_scheduler.StepLR(optimizer, 1).step()
    AveragedModel(net).update_parameters(net)


class Application:
    """An object of the script's that holds others, as it may be registered."""

    def __init__(self, **held: Any) -> None:
        self.held = held

    def state_dict(self) -> dict[str, Any]:
        return {name: part.state_dict() for name, part in self.held.items()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for name, part in self.held.items():
            part.load_state_dict(state_dict[name])


def test_what_a_registered_object_holds_is_registered() -> None:
    script, scaler = Script(), a_scaler()
    average = AveragedModel(script.net)
    script.engine.register_state("application", Application(scaler=scaler, average=average))

    def behind() -> None:
        if script.loader.is_at_step_end:
            scaler.update()
            average.update_parameters(script.net)

    script.train(lambda o: script.loader.is_at_step_end and scaler.step(o), behind, scaler.scale)
    assert average.n_averaged == 2


def test_an_average_within_the_wrapped_model_is_the_models_state() -> None:
    class Student(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(2, 1)
            self.teacher = AveragedModel(self.net).requires_grad_(False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.net(x)

    student = Student()
    script = Script(net=student)

    def update() -> None:
        if script.loader.is_at_step_end:
            student.teacher.update_parameters(student.net)

    train_with_average(script, update)
    assert student.teacher.n_averaged == 2


def test_a_schedule_that_follows_from_an_argument_needs_no_registration() -> None:
    script = Script(1)
    schedule = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(script.optimizer, 2)
    for epoch in range(2):
        schedule.step(epoch)
    with pytest.raises(NotDeterministicError, match="is not registered"):
        schedule.step()
