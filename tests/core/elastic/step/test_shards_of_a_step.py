"""Ends of steps of a deterministic job in which the script did not train on every shard."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from bagua_core.communication.pending import DonePending, Pending
from bagua_core.communication.step_interface import MicroBatch, StepPlan
from bagua_core.data.elastic_loader import ElasticDataLoader
from bagua_core.elastic.step.current_step import CurrentStep
from bagua_core.elastic.step.engine import Engine
from bagua_core.errors import NotDeterministicError
from bagua_core.parallel import DistributedDataParallel

SHARDS = 4
SAMPLES = torch.arange(16.0).view(16, 1)


class Script:
    """A script of a job with one worker, which has all shards."""

    def __init__(self) -> None:
        self.engine = Engine(None)
        self.engine.virtual_shards = SHARDS
        net = nn.Linear(1, 1)
        self.optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
        self.model = DistributedDataParallel(net, [self.optimizer], engine=self.engine)
        self.loader = ElasticDataLoader(SAMPLES, global_batch_size=8, seed=0, engine=self.engine)

    def body(self, x: torch.Tensor) -> None:
        self.optimizer.zero_grad()
        self.model(x).sum().backward()
        self.optimizer.step()


def test_a_break_in_the_middle_of_a_step_is_refused() -> None:
    """With as many workers as shards the step would be trained, and with one it would not."""
    script = Script()
    for step, x in script.loader.enumerate():
        script.body(x)
        if step == 1:
            break
    assert script.engine.state.name.step == 1
    with pytest.raises(NotDeterministicError, match="the last one was of shard 0 of 4"):
        script.engine.finish()


@pytest.mark.parametrize("where", ["at the end of a step", "before a step is trained on"])
def test_a_break_between_two_steps_is_not(where: str) -> None:
    script = Script()
    bodies = 0
    for step, x in script.loader.enumerate():
        if where == "before a step is trained on" and step == 1:
            break
        script.body(x)
        bodies += 1
        if where == "at the end of a step" and script.loader.is_at_step_end:
            break
    assert script.engine.finish() and bodies == SHARDS


@pytest.mark.parametrize(
    ("global_rank", "shards", "share"), [(0, 3, 4 / 3), (1, 3, 2 / 3), (1, 1, 0.0), (1, 0, None)]
)
def test_a_steps_time_counts_by_the_shards_of_the_worker(
    global_rank: int, shards: int, share: float | None
) -> None:
    step: Any = Engine(None)
    step.plan = StepPlan(1, 7, global_rank, 2)
    step._micro_batch = MicroBatch(1.0, True, 0 if shards else None, shards)
    assert step._share_of_shards() == share


@pytest.mark.parametrize(("virtual_shards", "collective"), [(0, "allgather"), (SHARDS, "allreduce")])
def test_a_worker_that_trained_nothing_votes_by_another_collective_than_buckets(
    virtual_shards: int, collective: str
) -> None:
    """A worker that did train waits then until the disagreement is found: Gloo ends a process whose peer's message has
    another size."""
    called: list[str] = []

    def allgather(rows: torch.Tensor, own: torch.Tensor) -> Pending:
        called.append("allgather")
        rows.copy_(own.expand_as(rows))
        return DonePending()

    def allreduce(own: torch.Tensor) -> Pending:
        called.append("allreduce")
        own.mul_(2)
        return DonePending()

    step: Any = CurrentStep(None)
    step.virtual_shards = virtual_shards
    communicator = SimpleNamespace(allgather=allgather, allreduce=allreduce, world_size=2)
    step.member = SimpleNamespace(
        communicator=communicator,
        lane=communicator,
        switch_value=lambda: 3.0,
        wait=lambda pending, what: pending.wait(),
    )
    step.metrics = {"loss": 5.0}
    assert step._vote("the end of a step") == (6.0, 18.0)
    assert called == [collective] and step.job_loss.mean == 5.0
