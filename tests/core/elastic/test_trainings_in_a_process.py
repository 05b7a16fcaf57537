"""Several trainings one after another in a process, by bagua.shutdown()."""

from __future__ import annotations

import gc
import multiprocessing
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import bagua_core as bagua
from bagua_core import torch_api
from bagua_core.data.partition import epoch_order
from bagua_core.elastic.step import runtime
from bagua_core.errors import TrainingOver
from bagua_core.torch_api.algorithms.gradient_allreduce import GradientAllReduceAlgorithm
from tests.lab.left_open import open_descriptors, opened_since, started_since
from tests.lab.wait import eventually

DATA = TensorDataset(torch.randn(24, 3, generator=torch.Generator().manual_seed(1)))


@pytest.fixture(autouse=True)
def no_training() -> Iterator[None]:
    bagua.shutdown()
    yield
    bagua.shutdown()


class Training:
    def __init__(self, num_workers: int = 0) -> None:
        torch.manual_seed(2)
        self.net = nn.Linear(3, 1)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1, momentum=0.9)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, 0.5)
        self.wrap(num_workers)

    def wrap(self, num_workers: int = 0) -> None:
        bagua.register_state("scheduler", self.scheduler)
        self.model = bagua.DistributedDataParallel(self.net, optimizers=[self.optimizer])
        self.loader = bagua.ElasticDataLoader(DATA, 8, seed=3, num_workers=num_workers)

    def train(self, epochs: int = 2) -> list[int]:
        steps = []
        for _ in self.loader.epochs(epochs):
            for (x,) in self.loader:
                steps.append(self.loader.step)
                self.step(x)
        return steps

    def step(self, x: torch.Tensor) -> None:
        self.optimizer.zero_grad()
        self.model(x).square().mean().backward()
        self.optimizer.step()
        self.scheduler.step()


def test_each_training_begins_at_step_0_and_ends_like_the_first() -> None:
    first = Training()
    assert first.train() == [0, 1, 2, 3, 4, 5]
    bagua.shutdown()
    second = Training()
    assert second.train() == [0, 1, 2, 3, 4, 5]
    assert torch.equal(first.net.weight, second.net.weight)
    assert second.scheduler.last_epoch == 6


def test_a_model_and_its_optimizer_are_trained_on_by_the_next_training() -> None:
    training = Training()
    training.train(1)
    bagua.shutdown()
    training.wrap()
    training.train(1)

    torch.manual_seed(2)
    plain = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    order = epoch_order(3, 0, 24, True)
    for batch in (*order.split(8), *order.split(8)):
        optimizer.zero_grad()
        plain(DATA.tensors[0][batch]).square().mean().backward()
        optimizer.step()
        scheduler.step()
    assert torch.equal(training.net.weight, plain.weight)


def test_an_interrupted_cell_can_be_run_again() -> None:
    training = Training()
    loss = training.model(next(iter(training.loader))[0]).square().mean()
    training.net.weight.register_post_accumulate_grad_hook(lambda _: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        loss.backward()
    bagua.shutdown()
    assert Training().train() == [0, 1, 2, 3, 4, 5]


def test_nothing_of_a_training_stays() -> None:
    Training(num_workers=1).train(1)  # what torch itself opens once and keeps
    bagua.shutdown()
    gc.collect()
    threads, files = set(threading.enumerate()), open_descriptors()
    training = Training(num_workers=2)
    training.train(1)
    processes = training.loader.worker_process_ids
    assert len(processes) == 2 and all(Path(f"/proc/{pid}").exists() for pid in processes)
    engine = weakref.ref(runtime.engine())
    bagua.shutdown()
    assert not multiprocessing.active_children()
    assert not any(Path(f"/proc/{pid}").exists() for pid in processes)
    # the thread that feeds a closed queue of torch's ends a moment later
    eventually(lambda: not started_since(threads), 10, lambda: f"no thread more: {started_since(threads)}")
    del training
    gc.collect()
    assert engine() is None
    assert not opened_since(files)


def test_it_does_nothing_without_a_training_and_when_called_again() -> None:
    bagua.shutdown()
    assert Training().train(1) == [0, 1, 2]
    bagua.shutdown()
    bagua.shutdown()
    assert runtime._engine is None


def test_what_belongs_to_an_ended_training_says_so() -> None:
    training = Training()
    training.train(1)
    bagua.shutdown()
    with pytest.raises(TrainingOver, match="make a new ElasticDataLoader"):
        training.train(2)
    with pytest.raises(TrainingOver, match="wrap the module again"):
        training.model(torch.ones(1, 3))
    with torch.no_grad():
        assert torch.equal(training.model(torch.ones(1, 3)), training.net(torch.ones(1, 3)))


def test_its_optimizer_and_scheduler_are_plain_ones_afterwards() -> None:
    training = Training()
    next(iter(training.loader))  # a step that is under way and never trained
    bagua.shutdown()
    before = training.net.weight.detach().clone()
    training.net(torch.ones(1, 3)).sum().backward()
    training.optimizer.step()
    training.scheduler.step()
    assert torch.allclose(training.net.weight, before - 0.1)
    assert training.scheduler.last_epoch == 1


def test_a_model_of_the_originals_surface_is_wrapped_again() -> None:
    net = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    torchs_own = torch.distributed.is_initialized
    for _ in range(2):
        torch_api.init_process_group(elastic=True)
        assert torch.distributed.is_initialized is not torchs_own
        model = torch_api.with_bagua(net, [optimizer], GradientAllReduceAlgorithm())
        loader = bagua.ElasticDataLoader(DATA, 8)
        steps = []
        for _ in loader.epochs(1):
            for (x,) in loader:
                before = net.weight.detach().clone()
                steps.append(loader.step)
                optimizer.zero_grad()
                model(x).sum().backward()
                optimizer.step()
                assert torch.allclose(net.weight, before - 0.1 * net.weight.grad)
        assert steps == [0, 1, 2]
        bagua.shutdown()
        assert torch.distributed.is_initialized is torchs_own
