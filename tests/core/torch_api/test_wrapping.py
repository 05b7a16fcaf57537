"""A model that is wrapped in place, or as under torch: it trains as plain torch does alone, and with peers as one."""

from __future__ import annotations

import copy
import io
import subprocess
import sys
import threading
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from bagua_core.collectives import Group
from bagua_core.communication.communicator import Communicator
from bagua_core.torch_api import algorithms, data_parallel
from bagua_core.torch_api.algorithms.async_model_average import AsyncModelAverageAlgorithm
from bagua_core.torch_api.errors import NoOptimizerError
from bagua_core.torch_api.optimizers_made import optimizers_of
from bagua_core.torch_api.process_group import BaguaProcessGroup
from bagua_core.torch_api.script_world import Script
from bagua_core.torch_api.wrapping import Wrapped, attach, check_group, check_ignored, wrapped
from tests.core.communication.worlds import in_process_world, run_ranks, seeded
from tests.core.torch_api.scripts_in_threads import LoopEngine, Net, batches, script, weights
from tests.lab.left_open import started_since
from tests.lab.wait import HANG_S

GRADIENTS = algorithms.gradient_allreduce.GradientAllReduceAlgorithm


class Run:
    """A script with one model, wrapped in place."""

    def __init__(
        self, communicator: Communicator | None = None, algorithm: Any = None, seed: int = 0
    ) -> None:
        self.engine, self.script = script(communicator)
        self.model = seeded(Net, seed)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.handle = attach(self.script, self.model, [self.optimizer], algorithm or GRADIENTS())

    def train(self, xs: list[torch.Tensor]) -> None:
        for x in xs:
            step(self.model, self.optimizer, x)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
    optimizer.zero_grad()
    F.mse_loss(model(x), x[:, :2]).backward()
    optimizer.step()


def plain(xs: list[torch.Tensor]) -> nn.Module:
    model = seeded(Net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for x in xs:
        step(model, optimizer, x)
    return model


def test_alone_it_trains_as_torch_does_bit_for_bit() -> None:
    run, xs = Run(), batches(5)
    run.train(xs)
    assert torch.equal(weights(run.model), weights(plain(xs)))
    assert run.engine.committed == 5


def test_it_stays_the_very_same_model() -> None:
    run = Run()
    assert list(run.model.state_dict()) == list(Net().state_dict())
    assert type(run.model) is Net


def test_two_workers_end_alike_with_the_mean_gradient() -> None:
    runs = [Run(c) for c in in_process_world(2)]
    halves = [batches(4, seed) for seed in (1, 2)]
    run_ranks(list(zip(runs, halves, strict=True)), lambda pair: pair[0].train(pair[1]))
    assert torch.equal(weights(runs[0].model), weights(runs[1].model))
    assert not torch.equal(weights(runs[0].model), weights(plain(halves[0])))
    assert [run.engine.committed for run in runs] == [4, 4]
    assert all(pair == (0.0, 0.0) for run in runs for pair in run.engine.pairs)


def test_buffers_of_rank_0_are_used_by_all() -> None:
    runs = [Run(c) for c in in_process_world(2)]
    runs[1].model.norm.running_mean.fill_(7.0)
    seen: dict[int, torch.Tensor] = {}

    def note(rank: int) -> Any:
        def hook(norm: Any, _: Any) -> None:
            seen[rank] = norm.running_mean.clone()

        return hook

    for rank, run in enumerate(runs):
        run.model.norm.register_forward_pre_hook(note(rank))
    run_ranks(runs, lambda run: run.train(batches(1)))
    assert torch.equal(seen[0], seen[1]) and not seen[1].any()


def test_a_failed_step_moves_nothing_and_is_not_counted() -> None:
    run, xs = Run(), batches(3)
    run.train(xs[:1])
    before, statistics = weights(run.model), run.model.norm.running_mean.clone()
    run.optimizer.zero_grad()
    loss = run.model(xs[1]).sum()
    run.engine.lose_the_step()
    loss.backward()
    run.optimizer.step()
    assert torch.equal(weights(run.model), before)
    assert torch.equal(run.model.norm.running_mean, statistics)
    assert run.engine.committed == 1 and len(run.engine.failures) == 1
    run.train(xs[2:])
    assert run.engine.committed == 2
    assert torch.equal(weights(run.model), weights(plain([xs[0], xs[2]])))


def test_a_schedule_of_the_script_goes_on_after_a_failed_step() -> None:
    run, xs = Run(), batches(4)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(run.optimizer, 0.5)
    for number, x in enumerate(xs):
        loss = run.model(x).sum()
        if number == 1:
            run.engine.lose_the_step()
        loss.backward()
        run.optimizer.step()
        scheduler.step()
    assert run.optimizer.param_groups[0]["lr"] == 0.1 * 0.5**4
    assert run.engine.committed == 3


def test_several_models_each_have_their_own_place() -> None:
    """Adversarial training with two wrapped models, alone and as torch would."""
    engine, one = script()
    both = [seeded(Net, 1), seeded(Net, 2)]
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in both]
    reference = copy.deepcopy(both)
    reference_optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in reference]
    for model, optimizer in zip(both, optimizers, strict=True):
        attach(one, model, [optimizer], GRADIENTS())
    assert wrapped(both[0]) is not wrapped(both[1])

    def play(models: list[nn.Module], steppers: list[torch.optim.Optimizer]) -> None:
        for x in batches(3):
            for first, second in ((0, 1), (1, 0)):
                steppers[first].zero_grad()
                (models[first](x).sum() + models[second](x).detach().sum()).backward()
                steppers[first].step()

    play(both, optimizers)
    play(reference, reference_optimizers)
    for model, expected in zip(both, reference, strict=True):
        assert torch.equal(weights(model), weights(expected))
    both[0](batches(1)[0])
    assert engine.committed == 6


def test_no_sync_gathers_gradients_of_one_step() -> None:
    run, (a, b) = Run(), batches(2)
    run.optimizer.zero_grad()
    with run.model.no_sync():
        F.mse_loss(run.model(a), a[:, :2]).backward()
    F.mse_loss(run.model(b), b[:, :2]).backward()
    run.optimizer.step()
    model = seeded(Net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for x in (a, b):
        F.mse_loss(model(x), x[:, :2]).backward()
    optimizer.step()
    torch.testing.assert_close(weights(run.model), weights(model))
    assert run.engine.committed == 1


def test_copies_and_pickles_of_a_model_are_models_without_peers() -> None:
    run = Run()
    average = copy.deepcopy(run.model)
    buffer = io.BytesIO()
    torch.save(run.model, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=False)
    for other in (average, loaded):
        other(batches(1)[0]).sum().backward()
        with other.no_sync():
            pass
        assert torch.equal(weights(other), weights(run.model))
    assert not run.engine.in_step and not run.engine.pairs
    with pytest.raises(ValueError, match="was not wrapped"):
        wrapped(average)


def test_evaluation_is_no_step_even_without_no_grad() -> None:
    run = Run()
    run.train(batches(1))
    run.model.eval()
    run.model(batches(1)[0])
    assert not run.engine.in_step
    run.model.train()
    with torch.no_grad():
        run.model(batches(1)[0])
    assert not run.engine.in_step and run.engine.committed == 1


def test_what_is_refused_is_refused_when_the_model_is_wrapped() -> None:
    run = Run()
    check_group(None)
    check_group(BaguaProcessGroup())
    check_group(BaguaProcessGroup(Group((0,), None, 0)))
    with pytest.raises(ValueError, match="by all workers of the job"):
        check_group("some of them")
    ignoring: Any = Net()
    ignoring._bagua_params_and_buffers_to_ignore = ["first.weight"]
    with pytest.raises(ValueError, match=r"names first\.weight: every parameter that trains is shared"):
        check_ignored(ignoring)
    with pytest.raises(ValueError, match="'gradient_alreduce' is unknown"):
        attach(run.script, Net(), [], "gradient_alreduce")
    with pytest.raises(ValueError, match="nothing to train"):
        attach(run.script, nn.Tanh(), [], GRADIENTS())


# -- as under torch


def parallel(model: nn.Module, running: Script, **arguments: Any) -> data_parallel.DistributedDataParallel:
    return data_parallel.DistributedDataParallel(model, script=running, **arguments)


def test_the_wrapper_finds_the_optimizer_that_the_script_makes_afterwards() -> None:
    engine, one = script()
    model = parallel(seeded(Net), one)
    unrelated = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    assert optimizers_of(model.parameters()) == [optimizer]
    xs = batches(3)
    for x in xs:
        step(model, optimizer, x)
    assert engine.committed == 3
    assert torch.equal(weights(model.module), weights(plain(xs)))
    assert engine.registry.optimizers == [optimizer] and unrelated not in model.optimizers
    before = weights(model)
    loss = model(xs[0]).sum()
    engine.lose_the_step()
    loss.backward()
    optimizer.step()
    assert torch.equal(weights(model), before), "momentum alone would have moved it"


def test_without_any_optimizer_it_says_so_at_the_first_forward() -> None:
    _, one = script()
    model = parallel(seeded(Net), one)
    with pytest.raises(NoOptimizerError, match=r"optimizers=\[optimizer\].*next_step"):
        model(batches(1)[0])


def test_the_size_of_buckets_is_the_scripts() -> None:
    def buckets(**arguments: Any) -> int:
        _, one = script()
        model = parallel(nn.Sequential(*[nn.Linear(64, 64) for _ in range(8)]), one, **arguments)
        return len(model._exchange.buckets_of_parameters())

    assert buckets() == 1
    assert buckets(bucket_cap_mb=0.016) > 4


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"device_ids": [0, 1]}, "a worker has one device"),
        ({"output_device": "cpu"}, "outputs stay where the model is"),
        ({"dim": 1}, "never split"),
        ({"process_group": object()}, "by all workers"),
        ({"algorithm": "ddp"}, "'ddp' is unknown"),
    ],
)
def test_nothing_falls_back_to_torchs_own_wrapper(arguments: dict[str, Any], words: str) -> None:
    _, one = script()
    with pytest.raises(ValueError, match=words):
        parallel(Net(), one, **arguments)


def test_inputs_go_to_the_one_device() -> None:
    _, one = script()

    class Sees(Net):
        def forward(self, x: dict[str, torch.Tensor]) -> Any:
            self.device = x["x"].device
            return super().forward(x["x"])

    model = parallel(Sees().to("meta"), one, device_ids=["meta"], optimizers=[], broadcast_buffers=False)
    with torch.no_grad():
        model({"x": batches(1)[0]})
    assert model.module.device == torch.device("meta")


# -- averaging in the background


def test_abort_and_resume_reach_the_models_own_rounds() -> None:
    algorithm = AsyncModelAverageAlgorithm(sync_interval_ms=0)
    runs = [Run(c, algorithm) for c in in_process_world(2)]
    other = Run()
    algorithm.abort(runs[0].model)
    assert [run.handle.exchange._mean.is_paused for run in runs] == [True, False]
    algorithm.resume(runs[0].model)
    assert not runs[0].handle.exchange._mean.is_paused
    with pytest.raises(ValueError, match="is not trained by AsyncModelAverageAlgorithm"):
        algorithm.abort(other.model)
    for run in runs:
        run.handle.exchange.close()


def test_a_process_with_averaging_under_way_ends_by_itself() -> None:
    code = """
import torch, bagua_core.torch_api as bagua
bagua.init_process_group()
m = torch.nn.Linear(2, 2)
o = torch.optim.SGD(m.parameters(), lr=0.1)
a = bagua.algorithms.Algorithm.init("async", sync_interval_ms=0)
m = m.with_bagua([o], a)
for _ in range(3):
    m(torch.ones(1, 2)).sum().backward(); o.step()
a.abort(m)
"""
    assert subprocess.run([sys.executable, "-c", code], timeout=HANG_S).returncode == 0


# -- where torch is touched


def test_torch_is_touched_by_this_package_alone() -> None:
    code = """
import torch
before = torch.optim.Optimizer.__init__
import bagua_core
assert not hasattr(torch.nn.Module, "with_bagua") and torch.optim.Optimizer.__init__ is before
import bagua_core.torch_api
import bagua_core.torch_api.optimizers_made as made
assert hasattr(torch.nn.Module, "with_bagua")
noted = torch.optim.Optimizer.__init__
made.take_note()
assert torch.optim.Optimizer.__init__ is noted is not before
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=HANG_S)


def test_a_handle_holds_no_thread() -> None:
    before = set(threading.enumerate())
    run = Run()
    run.train(batches(2))
    assert isinstance(run.handle, Wrapped) and isinstance(run.engine, LoopEngine)
    assert not started_since(before)
