"""Learning rates stay as they are between the micro-batches of a step, and schedules between its shards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from bagua_core.data.elastic_loader import ElasticDataLoader
from bagua_core.elastic.step.engine import Engine
from bagua_core.errors import NotDeterministicError
from bagua_core.optimizers.step_rates import RateChangedWithinStep
from bagua_core.parallel import DistributedDataParallel


def rates(limit: int | None, step: Callable[[Any, ElasticDataLoader], None], registered: bool) -> list[float]:
    """The learning rate of each forward, in two epochs of two steps with 8 samples."""
    engine = Engine(None)
    net = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    if registered:
        engine.register_state("scheduler", scheduler)
    model = DistributedDataParallel(net, optimizers=[optimizer], engine=engine)
    loader = ElasticDataLoader(TensorDataset(torch.ones(16, 2)), 8, max_local_batch_size=limit, engine=engine)
    seen = []
    for _ in loader.epochs(2):
        for (x,) in loader:
            seen.append(optimizer.param_groups[0]["lr"])
            optimizer.zero_grad()
            model(x).mean().backward()
            optimizer.step()
            step(scheduler, loader)
    return seen


def each_time(scheduler: Any, loader: ElasticDataLoader) -> None:
    scheduler.step()


def at_step_end(scheduler: Any, loader: ElasticDataLoader) -> None:
    if loader.is_at_step_end:
        scheduler.step()


def test_a_scheduler_that_is_not_the_jobs_is_refused_between_micro_batches() -> None:
    with pytest.raises(
        RateChangedWithinStep, match=r"from \[1\.0\] to \[0\.5\] within step 0.*is_at_step_end"
    ):
        rates(4, each_time, registered=False)
    assert rates(8, each_time, registered=False) == [1.0, 0.5, 0.25, 0.125]


@pytest.mark.parametrize(
    ("step", "registered"), [(each_time, True), (at_step_end, False), (at_step_end, True)]
)
def test_one_that_acts_at_the_end_of_a_step_is_not(step: Any, registered: bool) -> None:
    assert rates(4, step, registered) == [1.0, 1.0, 0.5, 0.5, 0.25, 0.25, 0.125, 0.125]


class OfItsOwn(torch.optim.lr_scheduler.LRScheduler):
    """A script's own, which does not call the step of torch's."""

    def get_lr(self) -> list[float]:
        return [1.0]

    def step(self, epoch: int | None = None) -> None:
        self.last_epoch += 1


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "StepLR": lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 2),
    "CosineAnnealingWarmRestarts": lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(
        optimizer, 2
    ),
    "ReduceLROnPlateau": torch.optim.lr_scheduler.ReduceLROnPlateau,
    "OfItsOwn": OfItsOwn,
    "SequentialLR": lambda optimizer: torch.optim.lr_scheduler.SequentialLR(
        optimizer, [torch.optim.lr_scheduler.StepLR(optimizer, 2) for _ in range(2)], [4]
    ),
}


def train_on_shards(
    make: Callable[[Any], Any], step: Callable[[Any, ElasticDataLoader], None], registered: bool
) -> int:
    """Trains two epochs of two steps with two shards each. Returns how often the schedule advanced."""
    engine = Engine(None)
    engine.virtual_shards = 2
    net = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    model = DistributedDataParallel(net, optimizers=[optimizer], engine=engine)
    scheduler = make(optimizer)
    began = scheduler.last_epoch
    if registered:
        engine.register_state("scheduler", scheduler)
    loader = ElasticDataLoader(TensorDataset(torch.ones(16, 2)), 8, seed=0, engine=engine)
    for _ in loader.epochs(2):
        for (x,) in loader:
            optimizer.zero_grad()
            model(x).mean().backward()
            optimizer.step()
            step(scheduler, loader)
    return int(scheduler.last_epoch - began)


def advance(scheduler: Any, loader: ElasticDataLoader) -> None:
    scheduler.step(*([1.0] if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau) else []))


@pytest.mark.parametrize("name", list(SCHEDULERS))
def test_a_schedule_that_counts_shards_is_refused_where_its_rate_stays(name: str) -> None:
    """Its rate would change between two steps, which shows nothing, and twice as early as with two workers."""
    with pytest.raises(RateChangedWithinStep, match=rf"^{name}\.step\(\) was called within step 0"):
        train_on_shards(SCHEDULERS[name], advance, registered=False)


def advance_at_step_end(scheduler: Any, loader: ElasticDataLoader) -> None:
    if loader.is_at_step_end:
        advance(scheduler, loader)


@pytest.mark.parametrize("name", list(SCHEDULERS))
def test_one_that_counts_steps_is_not_if_it_is_registered(name: str) -> None:
    for step in (advance, advance_at_step_end):
        assert train_on_shards(SCHEDULERS[name], step, registered=True) == 4


@pytest.mark.parametrize("name", list(SCHEDULERS))
def test_one_that_is_not_registered_is_refused(name: str) -> None:
    """A worker that joins would begin the schedule anew."""
    with pytest.raises(NotDeterministicError, match=rf"^{name}\.step\(\) was called, .* not registered"):
        train_on_shards(SCHEDULERS[name], advance_at_step_end, registered=False)


def test_one_that_stays_where_it_is_and_one_that_goes_on_from_an_epoch_are_not() -> None:
    constant = SCHEDULERS["CosineAnnealingWarmRestarts"]
    assert train_on_shards(constant, lambda s, loader: s.step(0), registered=False) == 0

    def resumed(optimizer: Any) -> Any:
        optimizer.param_groups[0]["initial_lr"] = 1.0
        return torch.optim.lr_scheduler.StepLR(optimizer, 2, last_epoch=3)

    assert train_on_shards(resumed, advance, registered=True) == 4
