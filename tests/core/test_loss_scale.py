"""Losses that are sums over samples give the gradient of one process on the whole batch."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import bagua_core
from bagua_core.communication.communicator import Communicator
from bagua_core.communication.step_interface import MicroBatch, StepPlan
from bagua_core.data.elastic_loader import ElasticDataLoader
from bagua_core.loss_scale import scaled
from bagua_core.parallel import DistributedDataParallel
from tests.core.communication.worlds import FakeEngine, in_process_world, run_ranks, seeded
from tests.core.data.fake_job import FakeEngine as LoadersEngine

X = torch.randn(12, 6, generator=torch.Generator().manual_seed(1))
CONSTANT = 128


def loss_of(model: nn.Module, begin: int, end: int) -> torch.Tensor:
    y: torch.Tensor = model(X[begin:end])
    return y.square().sum() / CONSTANT


def one_process(samples: int = 12) -> torch.Tensor:
    net = seeded(lambda: nn.Linear(6, 3))
    loss_of(net, 0, samples).backward()
    return net.weight.grad  # type: ignore[return-value]


# by rank, its micro-batches; an empty one is a filler whose gradient must not count
Parts = list[list[tuple[int, int]]]
SPLITS: list[Parts] = [
    [[(0, 12)]],
    [[(0, 6)], [(6, 12)]],
    [[(0, 2)], [(2, 9)], [(9, 12)]],
    [[(0, 12)], [(0, 0)]],
    [[(0, 3), (3, 5)], [(5, 10), (10, 12)], [(0, 0), (0, 0)]],
    [[(0, 5), (5, 6)], [(6, 12), (0, 0)]],
]


@pytest.mark.parametrize("parts", SPLITS)
def test_a_sum_over_samples_is_one_processs(parts: Parts) -> None:
    nets = [seeded(lambda: nn.Linear(6, 3)) for _ in parts]

    def act(communicator: Communicator) -> torch.Tensor:
        engine, net = FakeEngine(communicator), nets[communicator.global_rank]
        model = DistributedDataParallel(net, None, engine=engine)
        mine = parts[communicator.global_rank]
        for number, (begin, end) in enumerate(mine):
            engine.begin_micro_batch(MicroBatch((end - begin) / 12, number == len(mine) - 1))
            loss = loss_of(model, begin, end) if end > begin else loss_of(model, 0, 2) * torch.nan
            scaled(loss, engine.micro_batch).backward()
        return net.weight.grad  # type: ignore[return-value]

    for gradient in run_ranks(in_process_world(len(parts)), act):
        torch.testing.assert_close(gradient, one_process())


@pytest.mark.parametrize("batch", [12, 11, 3])
@pytest.mark.parametrize("divide", [True, False])
def test_a_sum_over_the_samples_of_divided_replicas_is_one_processs(batch: int, divide: bool) -> None:
    """Each of two replicas is two workers, whose gradients fully_shard averages. Of 3 samples, one worker has none."""
    net = seeded(lambda: nn.Linear(6, 3))
    reduced = torch.zeros_like(net.weight)
    for rank in range(4):
        engine = LoadersEngine()
        engine.plan, engine.shard = StepPlan(1, 0, rank // 2, 2), (rank % 2, 2)
        data = TensorDataset(X[:batch])
        loader = ElasticDataLoader(data, batch, shuffle=False, divide_in_replica=divide, engine=engine)
        (x,) = next(iter(loader))
        (micro_batch,) = engine.begun
        loss = scaled(net(x).square().sum() / CONSTANT, micro_batch)
        (gradient,) = torch.autograd.grad(loss * micro_batch.part, [net.weight])
        reduced += gradient / 2 * micro_batch.weight
    torch.testing.assert_close(reduced, one_process(batch))


def test_it_uses_the_micro_batch_of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = FakeEngine(None)
    monkeypatch.setattr(bagua_core.loss_scale.runtime, "engine", lambda: engine)
    engine.current = MicroBatch(0.25, True)
    assert bagua_core.scale_loss(torch.tensor(3.0)) == 12.0
