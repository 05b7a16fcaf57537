"""Several wrapped models: their collectives keep one order, whatever each rank's samples and script do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from bagua_core.algorithms import Decentralized
from bagua_core.communication.communicator import CollectiveFailed, Communicator
from bagua_core.communication.reduction.model_turns import ModelTurns
from bagua_core.communication.reduction.reduction_place import BackwardsDiffer
from bagua_core.parallel import DistributedDataParallel
from tests.core.communication.in_process import build_in_process
from tests.core.communication.worlds import FakeEngine, gloo_world, in_process_world, run_ranks, seeded

WORLDS = pytest.mark.parametrize("build", [in_process_world, gloo_world])


class Net(nn.Module):
    """Leaves its first layer out where told to, as stochastic depth does."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, width)

    def forward(self, x: torch.Tensor, is_short: bool = False) -> torch.Tensor:
        y: torch.Tensor = self.last(x if is_short else self.first(x))
        return y


class Worker:
    """Two models, with a bucket for each parameter."""

    def __init__(
        self, communicator: Communicator, nets: list[Callable[[], nn.Module]], **options: Any
    ) -> None:
        self.engine = FakeEngine(communicator)
        self.rank = communicator.global_rank
        self.nets = [seeded(net, seed) for seed, net in enumerate(nets)]
        options = {"bucket_cap_mb": 1e-5, **options}
        self.models = [DistributedDataParallel(net, None, engine=self.engine, **options) for net in self.nets]

    @property
    def x(self) -> torch.Tensor:
        return torch.full((2, 4), 1.0 + self.rank)

    def gradients(self) -> torch.Tensor:
        return torch.cat([p.grad.flatten() for n in self.nets for p in n.parameters() if p.grad is not None])

    def train_both(self) -> torch.Tensor:
        encoder, decoder = self.models
        decoder(encoder(self.x), is_short=self.rank == 0).square().mean().backward()
        return self.gradients()


def workers(world: list[Any], nets: list[Any] | None = None, **options: Any) -> list[Worker]:
    return [Worker(communicator, nets or [Net, Net], **options) for communicator in world]


def alone(rank: int) -> torch.Tensor:
    encoder, decoder = (seeded(Net, seed) for seed in range(2))
    decoder(encoder(torch.full((2, 4), 1.0 + rank)), is_short=rank == 0).square().mean().backward()
    parameters = [p for net in (encoder, decoder) for p in net.parameters()]
    return torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in parameters])


@WORLDS
@pytest.mark.parametrize("options", [{}, {"find_unused_parameters": True}, {"algorithm": "bytegrad"}])
def test_a_layer_that_one_rank_leaves_out_mixes_no_gradients_of_two_models(
    build: Callable[[int], list[Any]], options: dict[str, Any]
) -> None:
    """One backward goes through both: where the decoder's layer is left out, its bucket never fills."""
    found = run_ranks(workers(build(2), **options), lambda w: [w.train_both() for _ in range(2)])
    once = (alone(0) + alone(1)) / 2
    for steps in found:
        for number, step in enumerate(steps):
            torch.testing.assert_close(step, once * (1 + number))


@pytest.mark.parametrize("width", [4, 7])
def test_ranks_at_different_models_raise_and_mix_nothing(width: int) -> None:
    """Gloo would add gradients of one size, and end the process for those of two sizes."""
    members = workers(gloo_world(2), [Net, lambda: Net(width)])

    def act(worker: Worker) -> None:
        loss = worker.models[worker.rank](worker.x).square().mean()
        with pytest.raises(
            BackwardsDiffer, match=r"rank 0 is at model 1 \(Net\) and rank 1 at model 2 \(Net\)"
        ):
            loss.backward()

    run_ranks(members, act)
    for worker in members:
        assert not worker.engine.pairs
        assert worker.models[worker.rank].is_unfinished, "the next boundary gives the step up"


class WithBuffers(Net):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.register_buffer("statistics", torch.zeros(size))


@pytest.mark.parametrize(
    ("nets", "options"),
    [
        ([lambda: WithBuffers(3), lambda: WithBuffers(9)], {}),
        ([Net, lambda: Net(7)], {"algorithm": Decentralized(hierarchical=False)}),
    ],
    ids=["buffers", "weights"],
)
def test_so_do_those_whose_forwards_communicate(nets: list[Any], options: dict[str, Any]) -> None:
    def act(worker: Worker) -> None:
        with pytest.raises(BackwardsDiffer, match="rank 0 is at model 1"):
            worker.models[worker.rank](worker.x)

    run_ranks(workers(gloo_world(2), nets, **options), act)


def test_a_model_alone_takes_no_turns() -> None:
    world = in_process_world(2)
    messages = count_messages(world)
    members = workers(world)
    for worker in members:
        worker.models[0].detach()
    run_ranks(members, lambda w: w.models[1](w.x).square().mean().backward())
    assert messages == [0, 0]


def test_a_turn_is_one_message_of_each_model_in_a_backward() -> None:
    world = in_process_world(2)
    messages = count_messages(world)
    run_ranks(workers(world), Worker.train_both)
    assert messages == [2, 2]


def count_messages(world: list[Communicator]) -> list[int]:
    counts = [0] * len(world)
    for communicator in world:
        start = communicator.alltoall

        def alltoall(*tensors: Any, start: Any = start, rank: int = communicator.global_rank) -> Any:
            counts[rank] += 1
            return start(*tensors)

        communicator.alltoall = alltoall  # type: ignore[method-assign]
    return counts


def test_a_peer_lost_before_its_turn_fails_the_step() -> None:
    world = build_in_process(2)
    (survivor, _) = workers(list(world))
    world[1].lose("10.0.0.9")
    assert not survivor.train_both().any()
    assert isinstance(survivor.engine.failed, CollectiveFailed)


class Stops(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        raise ArithmeticError


class Stopping(Net):
    def forward(self, x: torch.Tensor, is_short: bool = False) -> torch.Tensor:
        y: torch.Tensor = self.last(x if is_short else Stops.apply(self.first(x)))
        return y


def test_a_backward_that_raised_behind_its_turn_fails_the_step() -> None:
    """Peers may wait for its buckets."""
    members = workers(in_process_world(2), [Stopping, Net], bucket_cap_mb=1)

    def act(worker: Worker) -> None:
        with pytest.raises(ArithmeticError):
            worker.models[0](worker.x).sum().backward()
        assert worker.engine.failed is None
        worker.models[0](worker.x, is_short=True).sum().backward()
        assert isinstance(worker.engine.failed, CollectiveFailed)

    run_ranks(members, act)


def test_the_first_model_of_a_backward_leads_it() -> None:
    turns = ModelTurns()
    encoder, decoder = turns.add("Encoder"), turns.add("Decoder")
    leads: list[tuple[int, bool]] = []
    weights = [torch.ones(1, requires_grad=True) for _ in range(2)]
    for number, weight in zip((encoder, decoder), weights, strict=True):
        weight.register_hook(lambda _, number=number: leads.append((number, turns.leads(number))))
    (weights[1] * (weights[0] * 2)).sum().backward()
    weights[0].sum().backward()
    assert leads[-1] == (encoder, True)
    assert [number for number, is_first in leads[:2] if is_first] == [leads[0][0]]
