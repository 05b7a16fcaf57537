"""What a wrapped model may not do in a deterministic job: one clear error each."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from bagua_core.algorithms import ByteGrad, GradientAllreduce, LocalSGD
from bagua_core.communication.reduction.trained_parameters import CannotTakeOn
from bagua_core.communication.step_interface import MicroBatch
from bagua_core.elastic.step.deterministic_worker import (
    deterministic_fingerprint,
    refuse_replicas,
    refuse_without_loader,
    threads_in,
)
from bagua_core.errors import NotDeterministicError
from bagua_core.model.shard_buffers import AUDIT_EVERY, AUDITED_STEPS
from bagua_core.optimizers.step_rates import RateChangedWithinStep
from bagua_core.parallel import DistributedDataParallel
from tests.core.communication.worlds import FakeEngine


class ShardEngine(FakeEngine):
    virtual_shards = 4


def wrapped(
    algorithm: object = "gradient_allreduce", net: nn.Module | None = None
) -> tuple[DistributedDataParallel, torch.optim.Optimizer]:
    net = nn.Linear(2, 2) if net is None else net
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    model = DistributedDataParallel(net, [optimizer], algorithm=algorithm, engine=ShardEngine())  # type: ignore[arg-type]
    return model, optimizer


@pytest.mark.parametrize(
    "algorithm",
    ["decentralized", "async", ByteGrad(), LocalSGD(unit="round"), GradientAllreduce(average=False)],
)
def test_algorithms_without_a_fixed_order(algorithm: object) -> None:
    with pytest.raises(NotDeterministicError, match='needs algorithm="gradient_allreduce"'):
        wrapped(algorithm)


def test_no_sync() -> None:
    model, _ = wrapped()
    with pytest.raises(NotDeterministicError, match="no_sync"), model.no_sync():
        pass


@pytest.mark.parametrize("where", ["whole", "part", "no"])
def test_a_compiled_model_is_named(where: str, capsys: pytest.CaptureFixture[str]) -> None:
    net = nn.Sequential(nn.Linear(2, 2))
    if where == "part":
        net[0].compile(backend="eager")
    wrapped(net=torch.compile(net, backend="eager") if where == "whole" else net)  # type: ignore[arg-type]
    said = {"whole": "the model is compiled; ", "part": "bagua: 0 is compiled; ", "no": ""}[where]
    assert said in (printed := capsys.readouterr().err) and bool(said) == bool(printed)


def take_step(model: DistributedDataParallel, step: int) -> None:
    """Of two shards."""
    engine = model._engine
    engine.step = step
    for shard in range(2):
        engine.begin_micro_batch(MicroBatch(0.5, shard == 1, shard, 2))
        model(torch.ones(1, 2)).sum().backward()
    model.step_committed()


def test_parameters_that_are_unfrozen_after_the_wrapping() -> None:
    net = nn.Linear(2, 2)
    net.bias.requires_grad_(False)
    model, _ = wrapped(net=net)
    take_step(model, 0)
    net.bias.requires_grad_(True)
    with pytest.raises(
        CannotTakeOn,
        match=r"^bias: these parameters were frozen when the model was wrapped, .* Wrap the model first",
    ):
        take_step(model, 1)


def test_parameters_that_are_frozen_after_the_wrapping_can_be_unfrozen() -> None:
    net = nn.Linear(2, 2)
    model, optimizer = wrapped(net=net)
    for step, trains_bias in enumerate((True, False, True)):
        optimizer.zero_grad()
        net.bias.requires_grad_(trains_bias)
        take_step(model, step)
        assert (net.bias.grad is not None) == trains_bias


def test_a_rate_that_changes_between_two_shards() -> None:
    model, optimizer = wrapped()
    engine = model._engine
    for step in range(2):  # between steps it may
        take_step(model, step)
        optimizer.param_groups[0]["lr"] /= 2
    engine.step = 2
    engine.begin_micro_batch(MicroBatch(0.5, False, 0, 2))
    model(torch.ones(1, 2)).sum().backward()
    optimizer.param_groups[0]["lr"] /= 2
    engine.begin_micro_batch(MicroBatch(0.5, True, 1, 2))
    with pytest.raises(RateChangedWithinStep, match=r"register_state"):
        model(torch.ones(1, 2))


class Checkpointed(nn.Module):
    """As torch recommends it: a part without its head."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.ReLU())
        self.head = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.head(checkpoint(self.body, x, use_reentrant=False))
        return found


def test_batch_norm_that_is_computed_again_in_the_backward() -> None:
    model, _ = wrapped(net=Checkpointed())
    model._engine.begin_micro_batch(MicroBatch(0.5, False, 0, 2))
    loss = model(torch.randn(4, 2)).sum()
    with pytest.raises(NotDeterministicError, match="computed outside its shard's forward"):
        loss.backward()


@pytest.mark.parametrize("when", ["before the forward", "behind the backward"])
def test_a_forward_without_gradients_that_updates_statistics(when: str) -> None:
    model, _ = wrapped(net=nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4)))
    x = torch.randn(4, 2)
    model._engine.in_step = False
    with torch.no_grad():
        model(x)  # between two steps
        model._engine.begin_micro_batch(MicroBatch(0.5, True, 1, 2))
        model._engine.in_step = True
        if when == "behind the backward":
            with torch.enable_grad():
                model(x).sum()
        with pytest.raises(NotDeterministicError, match="in a forward without gradients"):
            model(x)
        model.eval()
        model(x)


class MovingTarget(nn.Module):
    """BYOL's: a part follows another in each forward. through_data: as MoCo's own code does."""

    def __init__(self, *, through_data: bool = False) -> None:
        super().__init__()
        self.through_data = through_data
        self.online, self.target = nn.Linear(2, 2), nn.Linear(2, 2).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            for own, other in zip(self.target.parameters(), self.online.parameters(), strict=True):
                (own.data if self.through_data else own).mul_(0.9).add_(other.data, alpha=0.1)
        found: torch.Tensor = self.online(x) - self.target(x)
        return found


@pytest.mark.parametrize("through_data", [False, True])
@pytest.mark.parametrize("shards", [1, 2], ids=["one shard here", "several"])
def test_parameters_that_a_forward_changes(shards: int, through_data: bool) -> None:
    """Also on a worker with one shard: what is refused does not depend on the number of workers."""
    model, _ = wrapped(net=MovingTarget(through_data=through_data))
    model._engine.begin_micro_batch(MicroBatch(1 / shards, shards == 1, 0, shards))
    with pytest.raises(
        NotDeterministicError, match=r"target.weight was changed by the script, or in a forward"
    ):
        model(torch.ones(1, 2)).sum().backward()


def test_parameters_that_the_script_changes_between_two_shards() -> None:
    model, _ = wrapped()
    take_step(model, 0)
    with torch.no_grad():
        model.module.weight.mul_(0.5)  # between two steps it may
    take_step(model, 1)
    model._engine.begin_micro_batch(MicroBatch(0.5, False, 0, 2))
    model(torch.ones(1, 2)).sum().backward()
    with torch.no_grad():
        model.module.weight.mul_(0.5)
    model._engine.begin_micro_batch(MicroBatch(0.5, True, 1, 2))
    with pytest.raises(NotDeterministicError, match="weight was changed by the script"):
        model(torch.ones(1, 2))


@pytest.mark.parametrize("replaced", ["parameter", "submodule", "exchange"])
def test_parameters_that_the_script_replaces_between_two_shards(replaced: str) -> None:
    model, _ = wrapped(net=nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)))
    model._engine.begin_micro_batch(MicroBatch(0.5, False, 0, 2))
    model(torch.ones(1, 2)).sum().backward()
    net = model.module
    if replaced == "parameter":
        net[0].weight = nn.Parameter(net[0].weight.detach().clone())
    elif replaced == "submodule":
        net[0] = nn.Linear(2, 2)
    else:
        net[0], net[2] = net[2], net[0]
    model._engine.begin_micro_batch(MicroBatch(0.5, True, 1, 2))
    with pytest.raises(NotDeterministicError, match=r"0\.weight was changed by the script"):
        model(torch.ones(1, 2))


def test_parameters_that_the_script_changes_through_data() -> None:
    """That leaves the version of the tensor. The bytes are compared in the first steps, and in some of the others."""
    model, _ = wrapped(net=nn.Linear(2, 2, dtype=torch.float64))
    engine, x = model._engine, torch.ones(1, 2, dtype=torch.float64)

    def train(step: int, *, changes: bool) -> None:
        engine.step = step
        for shard in range(2):
            engine.begin_micro_batch(MicroBatch(0.5, shard == 1, shard, 2))
            model(x).sum().backward()
            if changes and shard == 0:
                model.module.weight.data.mul_(0.9)
        model.step_committed()

    for step in range(AUDIT_EVERY - 1):
        train(step, changes=step >= AUDITED_STEPS)
    with pytest.raises(NotDeterministicError, match="weight was changed by the script"):
        train(AUDIT_EVERY - 1, changes=True)


def test_loops_without_the_loader_and_replicas_of_several_workers() -> None:
    with pytest.raises(NotDeterministicError, match="ElasticDataLoader"):
        refuse_without_loader(4)
    with pytest.raises(NotDeterministicError, match="--replica-size 2"):
        refuse_replicas(4, 2)
    refuse_without_loader(0)
    refuse_replicas(0, 2)
    refuse_replicas(4, 1)


def test_the_fingerprint_names_what_bits_depend_on() -> None:
    assert deterministic_fingerprint(0) == {}
    found = deterministic_fingerprint(4)
    assert found["virtual_shards"] == "4" and found["torch_build"] == torch.__version__
    assert {"processor", "gpu", "threads", "mkl_mode"} <= found.keys() and all(found.values())


def test_threads_are_one_unless_the_job_says_otherwise() -> None:
    assert [threads_in(text) for text in (None, "", "0", "x", "1", "3")] == [1, 1, 1, 1, 1, 3]
