"""The job's mean loss comes with a step's gradients, whatever their type."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from bagua_core.communication.reduction.reducer import Reducer
from bagua_core.communication.reduction.reported_loss import JobLoss
from tests.core.communication.worlds import FakeEngine, in_process_world, run_ranks, seeded


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_it_is_the_mean_over_the_ranks_that_report_one(dtype: torch.dtype) -> None:
    x = torch.ones(2, 6, dtype=dtype)
    members = [(FakeEngine(c), seeded(lambda: nn.Linear(6, 3).to(dtype))) for c in in_process_world(3)]
    reducers = [Reducer(model.parameters(), engine) for engine, model in members]

    def act(rank: int) -> None:
        engine, model = members[rank]
        for losses in ((None, None, None), (None, 3.0, 1.0), (1.0, 3.0, 8.0), (1.0, math.nan, 8.0)):
            engine.loss = losses[rank]
            model(x).sum().backward()

    run_ranks(range(len(reducers)), act)
    for engine, _ in members:
        *usual, diverged = engine.job_losses
        assert usual == [None, JobLoss(2.0, 2), JobLoss(4.0, 3)]
        assert diverged is not None and math.isnan(diverged.mean) and diverged.reporting == 3
