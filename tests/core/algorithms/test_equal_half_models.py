"""The mean of equal models in half precision is the same model, bit for bit, for any number of workers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from bagua_core.algorithms import Algorithm, AsyncModelAverage, Decentralized
from bagua_core.communication.communicator import Lane
from bagua_core.communication.weights.background_mean import BackgroundMean
from bagua_core.communication.weights.weight_buckets import make_equal
from tests.core.algorithms.weight_workers import Shares, Worker, train_all, workers, world
from tests.core.communication.worlds import DEADLINE_S, FakeEngine, in_process_world, run_ranks, seeded

HALVES = [torch.bfloat16, torch.float16]


def still(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.0)


class Half(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 300).to(dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.layer(x.to(self.layer.weight.dtype)).float()
        return y


def model(dtype: torch.dtype) -> Callable[[], nn.Module]:
    return lambda: Half(dtype)


def average_over(worker: Worker) -> Callable[[torch.Tensor], torch.Tensor]:
    """As the engine gives it to Exchange.finish."""

    def average(tensor: torch.Tensor) -> torch.Tensor:
        communicator, result = worker.engine.communicator(), tensor.clone()
        assert communicator is not None
        communicator.allreduce(result).wait()
        return result.div_(communicator.world_size)

    return average


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(
    ("algorithm", "size", "nodes"),
    [
        (Decentralized(), 3, ()),
        (Decentralized(), 7, ()),
        (Decentralized(), 7, ((0, 1, 2), (3, 4, 5, 6))),
        (Decentralized(peer_selection="shift_one"), 7, ((0, 1, 2), (3, 4, 5, 6))),
    ],
)
def test_an_exchange_and_the_end(
    algorithm: Algorithm, size: int, nodes: tuple[tuple[int, ...], ...], dtype: torch.dtype
) -> None:
    members = workers(size, algorithm, still, nodes, model(dtype))
    before = members[0].weights()
    train_all(members, 1, Shares.even(size))
    assert all(torch.equal(worker.weights(), before) for worker in members)
    run_ranks(members, lambda worker: worker.model.finish(average_over(worker)))
    assert all(torch.equal(worker.weights(), before) for worker in members)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("size", [3, 7])
@pytest.mark.parametrize("weighted", [False, True], ids=["step", "round"])
def test_an_average_in_the_background(size: int, weighted: bool, dtype: torch.dtype) -> None:
    """What was learned meanwhile stays, rounded once."""
    main = in_process_world(size)
    models = [seeded(model(dtype)) for _ in main]
    means = []
    for rank, (communicator, each) in enumerate(zip(main, models, strict=True)):
        means.append(
            BackgroundMean(list(each.parameters()), FakeEngine(communicator), 0.0, weighted=weighted)
        )
        means[-1].trained(0.1 + 0.3 * rank)
    before = [p.detach().clone() for p in models[0].parameters()]
    for mean, communicator in zip(means, main, strict=True):
        mean.begin_if_due(communicator)
    for mean in means:
        assert mean.wait(DEADLINE_S)
        mean.take_in()
        assert mean.count == 1
    for each in models:
        for parameter, expected in zip(each.parameters(), before, strict=True):
            assert parameter.dtype is dtype
            assert torch.equal(parameter.detach(), expected)


@pytest.mark.parametrize("size", [3, 7])
def test_the_end_by_weight(size: int) -> None:
    members = [Worker(c, Decentralized(), still, model(torch.bfloat16)) for c in world(size)]
    before = members[0].weights()

    def act(worker: Worker) -> None:
        make_equal(list(worker.inner.parameters()), average_over(worker), 0.1 + 0.3 * worker.rank)

    run_ranks(members, act)
    assert all(torch.equal(worker.weights(), before) for worker in members)


def test_the_algorithm_of_the_background_has_such_averages() -> None:
    main, beside = in_process_world(3), in_process_world(3)
    for a, b in zip(main, beside, strict=True):
        a.lanes = {Lane.BACKGROUND: b}
    members = [Worker(c, AsyncModelAverage(sync_interval_ms=0), still, model(torch.bfloat16)) for c in main]
    before = members[0].weights()

    def act(worker: Worker) -> None:
        for _ in range(3):
            assert worker.train(Shares.even(3))
            assert worker.model._exchange.wait_for_round(DEADLINE_S)  # type: ignore[attr-defined]
        worker.model.finish(average_over(worker))

    run_ranks(members, act)
    assert all(torch.equal(worker.weights(), before) for worker in members)
