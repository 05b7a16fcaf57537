"""The runtime's own numbers do not follow torch's default dtype, which scripts of large models set to bfloat16."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from bagua_core.communication.communicator import Communicator
from bagua_core.communication.reduction.reported_loss import JobLoss
from bagua_core.parallel import DistributedDataParallel
from tests.core.communication.worlds import FakeEngine, in_process_world, run_ranks, seeded
from tests.core.defaults import default_dtype

STEPS = 9  # counts of steps repeat after eight, see reduction_place.py


@pytest.fixture(autouse=True)
def bfloat16_by_default() -> Iterator[None]:
    with default_dtype(torch.bfloat16):
        yield


class Worker:
    def __init__(self, communicator: Communicator, dtype: torch.dtype) -> None:
        self.engine = FakeEngine(communicator)
        inner = seeded(lambda: nn.Linear(4, 2)).to(dtype)
        self.inputs = torch.ones(3, 4, dtype=dtype)
        self.optimizer = torch.optim.SGD(inner.parameters(), lr=0.001)
        self.model = DistributedDataParallel(inner, [self.optimizer], engine=self.engine)

    def step(self, backwards: int) -> None:
        for _ in range(backwards):
            self.model(self.inputs).sum().backward()
        self.optimizer.step()
        self.model.step_committed()
        self.engine.step += 1


@pytest.mark.parametrize("parameters", [torch.bfloat16, torch.float32], ids=str)
def test_steps_of_several_backwards_agree(parameters: torch.dtype) -> None:
    members = [Worker(c, parameters) for c in in_process_world(2)]

    def act(w: Worker) -> None:
        for _ in range(STEPS):
            w.step(backwards=2)

    run_ranks(members, act)
    assert all(len(w.engine.pairs) == 2 * STEPS for w in members)


@pytest.mark.parametrize("parameters", [torch.bfloat16, torch.float32], ids=str)
def test_the_reported_loss_is_summed_in_single_precision(parameters: torch.dtype) -> None:
    members = [Worker(c, parameters) for c in in_process_world(2)]
    for w, loss in zip(members, (1001.0, 2.5), strict=True):
        w.engine.loss = loss
    run_ranks(members, lambda w: w.step(backwards=1))
    assert all(w.engine.job_losses == [JobLoss(501.75, 2)] for w in members)
