"""A model with batch normalization trains on an epoch's short last batch on any number of workers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import IterableDataset, TensorDataset

from bagua_core.communication.step_interface import StepPlan
from bagua_core.data.balancing.balance import Balance
from bagua_core.data.elastic_loader import ElasticDataLoader
from tests.core.data.fake_job import FakeEngine

SAMPLES, BATCH, WORKERS = 73, 64, 8


class Places(IterableDataset[Any]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(torch.arange(float(SAMPLES)).unsqueeze(1))


@pytest.mark.parametrize(
    ("dataset", "arguments"),
    [
        (TensorDataset(torch.arange(float(SAMPLES)).unsqueeze(1)), {}),
        (TensorDataset(torch.arange(float(SAMPLES)).unsqueeze(1)), {"max_local_batch_size": 3}),
        (TensorDataset(torch.arange(float(SAMPLES)).unsqueeze(1)), {"balance": Balance(lambda sample: 1.0)}),
        (Places(), {"max_local_batch_size": 3}),
        (Places(), {}),
    ],
)
def test_no_worker_trains_batch_normalization_on_one_sample(dataset: Any, arguments: dict[str, Any]) -> None:
    seen: list[float] = []
    weights = 0.0
    for rank in range(WORKERS):
        engine = FakeEngine()
        engine.plan = StepPlan(1, 0, rank, WORKERS)
        loader = ElasticDataLoader(dataset, BATCH, engine=engine, **arguments)
        layer = nn.BatchNorm1d(1)
        for _ in loader.epochs(1):
            for drawn in loader:
                batch = drawn if isinstance(drawn, torch.Tensor) else drawn[0]
                layer(batch)  # raises for a batch of one sample
                if (weight := engine.begun[-1].weight) > 0:
                    seen += batch.flatten().tolist()
                    weights += weight
    assert sorted(seen) == list(range(SAMPLES))
    assert weights == pytest.approx(2.0), "each batch's weights add up to 1"
