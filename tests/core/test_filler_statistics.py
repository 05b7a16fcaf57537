"""Micro-batches without samples leave a model's buffers as they are: filler samples are no part of the job's data."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import IterableDataset, TensorDataset

from bagua_core.communication.communicator import Communicator, Lane
from bagua_core.communication.step_interface import MicroBatch
from bagua_core.data.elastic_loader import ElasticDataLoader
from bagua_core.elastic.step.engine import Engine
from bagua_core.parallel import DistributedDataParallel
from bagua_core.sync_batchnorm import SyncBatchNorm
from bagua_core.torch_api.loop_steps import LoopSteps
from bagua_core.torch_api.script_world import Script, ScriptWorld
from bagua_core.torch_api.wrapping import attach, release, wrapped
from tests.core.communication.worlds import FakeEngine, in_process_world, run_ranks, seeded
from tests.core.torch_api.scripts_in_threads import script

# the first items, which are the fillers, are far from all others
ITEMS = torch.cat(
    [torch.full((2, 3), 1000.0), torch.randn(32, 3, generator=torch.Generator().manual_seed(4))]
)
REAL, FILLER = MicroBatch(1.0, True), MicroBatch(0.0, True)


class Items(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(TensorDataset(ITEMS)[i] for i in range(len(ITEMS)))


def net() -> nn.Sequential:
    return seeded(lambda: nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)))


class CheckpointedNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = net()

    def forward(self, x: torch.Tensor) -> Any:
        return checkpoint(self.layers, x.requires_grad_(), use_reentrant=False)


def buffers_after_training(
    dataset: Any, module: nn.Module, is_in_place: bool = False
) -> dict[str, torch.Tensor]:
    """Of one process. 34 items make steps of 16 samples in 4 micro-batches, and a last step of 2 samples."""
    engine = Engine(None)
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-9)
    if is_in_place:
        model = module
        attach(
            Script(engine, ScriptWorld(engine), LoopSteps(engine)), model, [optimizer], "gradient_allreduce"
        )
    else:
        model = DistributedDataParallel(module, optimizers=[optimizer], engine=engine)
    loader = ElasticDataLoader(
        dataset,
        16,
        max_local_batch_size=4,
        engine=engine,
        **({} if isinstance(dataset, Items) else {"shuffle": False}),
    )
    for _ in loader.epochs(1):
        for (x,) in loader:
            optimizer.zero_grad()
            model(x).mean().backward()
            optimizer.step()
    return dict(module.named_buffers())


@pytest.mark.parametrize("is_in_place", [False, True])
@pytest.mark.parametrize("build", [net, lambda: SyncBatchNorm.convert(net()), CheckpointedNet])
def test_a_streams_short_last_batch_gives_the_statistics_of_its_samples(
    build: Any, is_in_place: bool
) -> None:
    of_stream = buffers_after_training(Items(), build(), is_in_place)
    of_map = buffers_after_training(TensorDataset(ITEMS), build(), is_in_place)
    assert of_map
    for name, buffer in of_map.items():
        assert torch.equal(of_stream[name], buffer), name


class Failing(nn.Module):
    """Its forward raises behind the normalization."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = net()
        self.fails = True

    def forward(self, x: torch.Tensor) -> Any:
        y = self.layers(x)
        if self.fails:
            raise ArithmeticError
        return y


def test_an_in_place_forward_that_raises_is_taken_back_and_copies_keep_theirs() -> None:
    engine, one = script()
    model = Failing()
    attach(one, model, [torch.optim.SGD(model.parameters(), lr=1e-9)], "gradient_allreduce")
    engine.begin_micro_batch(FILLER)
    engine.in_step = True
    with pytest.raises(ArithmeticError):
        model(ITEMS[:2])
    assert model.layers[1].num_batches_tracked == 0
    copied = copy.deepcopy(model)
    for each in (model, copied):
        each.fails = False
        each(ITEMS[:2])
    assert model.layers[1].num_batches_tracked == 0 and copied.layers[1].num_batches_tracked == 1
    engine.begin_micro_batch(REAL)
    model(ITEMS[2:6])
    assert model.layers[1].num_batches_tracked == 1
    wrapped(model).parallel.detach()
    release(model)
    assert not model._forward_hooks and not model._forward_pre_hooks


class Odd(nn.Module):
    """Its forward replaces one buffer, makes one, and changes the form of a third."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.register_buffer("replaced", torch.zeros(1))
        self.register_buffer("made", None)
        self.register_buffer("grown", torch.zeros(1))
        self.register_buffer("used", torch.ones(1))
        self.register_buffer("forwards", torch.tensor(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.weight * self.used * x.sum()
        self.replaced = self.replaced + 1
        self.forwards = self.forwards + 1
        self.made = torch.ones(2)
        self.grown = torch.zeros(len(self.grown) + 1)
        with torch.no_grad():
            self.used.data.add_(1)
        return y


def test_a_forward_of_a_filler_is_taken_back_from_buffers_of_every_kind() -> None:
    engine = FakeEngine()
    module = Odd()
    model = DistributedDataParallel(module, None, engine=engine)
    engine.begin_micro_batch(FILLER)
    used = module.used
    for _ in range(2):  # as the discriminator of a generator
        model(torch.ones(1)).backward()
    assert module.used is used and used.item() == 1.0
    assert module.replaced.item() == 0.0
    assert module.forwards.item() == 2, "the other workers count these forwards too"
    assert len(module.made) == 2 and len(module.grown) == 3, "all workers must have buffers of the same forms"
    engine.begin_micro_batch(REAL)
    model(torch.ones(1)).backward()
    assert module.replaced.item() == 1.0 and module.used.item() == 2.0


def test_a_graph_of_an_earlier_forward_can_still_be_used() -> None:
    engine = FakeEngine()
    model = DistributedDataParallel(net(), None, engine=engine)
    first = model(ITEMS[2:6])
    before = copy.deepcopy(model.state_dict())
    engine.begin_micro_batch(FILLER)
    (first.sum() + model(ITEMS[:2]).sum()).backward()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_worker_that_heals_and_an_evaluation_keep_their_changes() -> None:
    engine = FakeEngine()
    module = net()
    model = DistributedDataParallel(module, None, engine=engine)
    engine.begin_micro_batch(FILLER)
    engine.healing = frozenset({0})
    model(ITEMS[:4])
    assert module[1].num_batches_tracked == 1
    engine.healing = frozenset()
    model.eval()
    module[1].train()  # of a script that estimates the statistics anew
    model(ITEMS[:4])
    assert module[1].num_batches_tracked == 2


def synchronized(weights: dict[int, float], momentum: float | None = 0.1) -> list[SyncBatchNorm]:
    """Each rank's layer after one forward in micro-batches of these weights."""
    main, lanes = in_process_world(len(weights)), in_process_world(len(weights))

    def act(communicator: Communicator) -> SyncBatchNorm:
        rank = communicator.global_rank
        communicator.lanes = {Lane.STATISTICS: lanes[rank]}
        engine = FakeEngine(communicator)
        layer = SyncBatchNorm(3, momentum=momentum, engine=engine)
        model = DistributedDataParallel(layer, None, broadcast_buffers=False, engine=engine)
        engine.begin_micro_batch(MicroBatch(weights[rank], True))
        model(ITEMS[2 + 4 * rank : 6 + 4 * rank] if weights[rank] else ITEMS[:2]).sum().backward()
        return layer

    return run_ranks(main, act)


@pytest.mark.parametrize("momentum", [0.1, None])
def test_synchronized_statistics_count_batches_with_samples_only(momentum: float | None) -> None:
    for layer in synchronized({0: 0.0, 1: 0.0}, momentum):
        assert layer.num_batches_tracked == 0
        assert torch.equal(layer.running_mean, torch.zeros(3)) and torch.equal(
            layer.running_var, torch.ones(3)
        )
    real, filler = synchronized({0: 1.0, 1: 0.0}, momentum)
    assert real.num_batches_tracked == filler.num_batches_tracked == 1
    assert torch.equal(real.running_mean, filler.running_mean) and real.running_mean.any()
    assert torch.equal(real.running_var, filler.running_var)
