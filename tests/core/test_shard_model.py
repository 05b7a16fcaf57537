"""What a wrapped model may not do in a deterministic job: one clear error each."""

from __future__ import annotations

import pytest
import torch
from torch import nn

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
    with pytest.raises(NotDeterministicError, match=r"register_state"):
        model(torch.ones(1, 2))


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
