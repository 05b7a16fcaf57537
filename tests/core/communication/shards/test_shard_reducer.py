"""The gradient of a step has the same bits for any number of workers and any division of the shards among them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

from bagua_core.communication.communicator import CollectiveFailed, Communicator
from bagua_core.communication.reduction.operation_queue import operation_queue_of
from bagua_core.communication.shards import tree_sum
from bagua_core.communication.shards.shard_reducer import ShardReducer
from bagua_core.communication.shards.shard_tree import leaves_of
from bagua_core.communication.step_interface import MicroBatch
from bagua_core.errors import NotDeterministicError
from bagua_core.model.shard_buffers import ShardBuffers
from tests.core.communication.worlds import FakeEngine, gloo_world, in_process_world, run_ranks, seeded

SHARDS = 6
SAMPLES = torch.randn(18, 6, generator=torch.Generator().manual_seed(1))
TARGETS = torch.randn(18, 3, generator=torch.Generator().manual_seed(2))


def net() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)
    )


class Worker:
    """A model with its reducer, and an engine whose micro-batches are this worker's shards."""

    def __init__(self, communicator: Communicator | None, build: Callable[[], nn.Module] = net) -> None:
        self.engine = FakeEngine(communicator)
        self.model = seeded(build)
        self.reducer = ShardReducer(
            self.model.parameters(),
            self.engine,
            200,
            False,
            operation_queue_of(self.engine),
            ShardBuffers(self.model),
        )

    def shards(self) -> Iterator[range]:
        """Places of the samples of each shard, in order."""
        plan = self.engine.plan
        index = plan.active_index
        own = leaves_of(SHARDS, plan.active_count, index) if index is not None else range(0)
        for shard in own:
            self.engine.begin_micro_batch(MicroBatch(1 / SHARDS, shard == own[-1], shard, SHARDS))
            yield range(3 * shard, 3 * shard + 3)
        if not own:
            self.engine.begin_micro_batch(MicroBatch(0.0, True, None, SHARDS))
            yield range(0, 2)

    def step(self, zero: str = "none") -> None:
        for places in self.shards():
            if zero != "never":
                self.model.zero_grad(set_to_none=zero == "none")
            self.backward(places)
        self.reducer.step_committed()

    def backward(self, places: range) -> None:
        self.reducer.forward_begins()
        found = self.model(SAMPLES[places.start : places.stop])
        nn.functional.mse_loss(found, TARGETS[places.start : places.stop]).backward()

    @property
    def bits(self) -> list[bytes]:
        tensors = [p.grad for p in self.model.parameters() if p.grad is not None] + list(self.model.buffers())
        return [bytes(t.detach().reshape(-1).view(torch.uint8).tolist()) for t in tensors]


def bits_of(world: list[Worker], zero: str = "none", steps: int = 2) -> list[bytes]:
    def act(worker: Worker) -> None:
        for _ in range(steps):
            worker.step(zero)

    run_ranks(world, act)
    assert all(worker.bits == world[0].bits for worker in world)
    return world[0].bits


@pytest.mark.parametrize("zero", ["none", "zeros", "never"])
def test_any_number_of_workers_gets_the_bits_of_one(zero: str) -> None:
    alone = bits_of([Worker(None)], zero)
    for world_size in (2, 3, 4, 7):  # seven: one without a shard
        assert bits_of([Worker(c) for c in in_process_world(world_size)], zero) == alone, world_size


class WithKeys(nn.Module):
    """MoCo's: a part with BatchNorm computes without gradients within the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.queries = net()
        self.keys = net().requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            keys = self.keys(x)
        found: torch.Tensor = self.queries(x) + keys
        return found


def test_statistics_of_a_part_without_gradients_have_the_same_bits_too() -> None:
    alone = bits_of([Worker(None, WithKeys)])
    for world_size in (2, 3):
        assert bits_of([Worker(c, WithKeys) for c in in_process_world(world_size)]) == alone, world_size


def test_in_chunks_and_over_gloo_too(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = bits_of([Worker(None)])
    monkeypatch.setattr(tree_sum, "goes_whole", lambda covers, size_bytes: False)
    for world_size in (2, 3, 4):
        assert bits_of([Worker(c) for c in gloo_world(world_size)]) == alone, world_size


def test_a_worker_that_heals_adds_nothing_and_gets_the_gradient() -> None:
    alone = bits_of([Worker(None)], steps=1)
    world = [Worker(c) for c in in_process_world(3)]
    for worker in world:
        worker.engine.healing = frozenset({0})  # the first shard is rank 1's then
    assert bits_of(world, steps=1) == alone


def test_the_result_is_the_mean_and_the_running_statistics_of_the_shards_one_by_one() -> None:
    plain = seeded(net)
    total = [torch.zeros_like(p) for p in plain.parameters()]
    for shard in range(SHARDS):
        plain.zero_grad()
        found = plain(SAMPLES[3 * shard : 3 * shard + 3])
        nn.functional.mse_loss(found, TARGETS[3 * shard : 3 * shard + 3]).backward()
        for gradient, parameter in zip(total, plain.parameters(), strict=True):
            gradient.add_(parameter.grad, alpha=1 / SHARDS)
    world = [Worker(c) for c in in_process_world(2)]
    run_ranks(world, Worker.step)
    for parameter, want in zip(world[1].model.parameters(), total, strict=True):
        torch.testing.assert_close(parameter.grad, want)
    for own, want in zip(world[1].model.buffers(), plain.buffers(), strict=True):
        torch.testing.assert_close(own, want)


def test_gradients_are_zero_between_the_shards_of_a_step() -> None:
    worker = Worker(None)
    for places in worker.shards():
        worker.backward(places)
        if not worker.engine.micro_batch.last:
            assert all(not p.grad.any() for p in worker.model.parameters() if p.grad is not None)


def test_a_failed_step_leaves_nothing_behind() -> None:
    alone = bits_of([Worker(None)], steps=1)
    world = [Worker(c) for c in in_process_world(2)]

    def fail(worker: Worker) -> None:
        shards = worker.shards()
        worker.backward(next(shards))
        if worker.engine.plan.global_rank == 0:  # the other one is lost before its last shard
            worker.engine.communicator().abort("a peer was lost")
            for places in shards:
                worker.backward(places)
            assert isinstance(worker.engine.failed, CollectiveFailed)
            worker.reducer.step_rolled_back()

    run_ranks(world, fail)
    survivor = world[0]
    survivor.engine.enter(None)
    survivor.reducer.communicator_changed()
    assert bits_of([survivor], steps=1) == alone


def test_two_backwards_in_a_shard_are_refused() -> None:
    worker = Worker(None)
    worker.model.eval()  # a BatchNorm layer that computes twice has an error of its own
    places = next(worker.shards())
    worker.backward(places)
    with pytest.raises(NotDeterministicError, match="a second backward"):
        worker.backward(places)


def test_a_last_shard_without_a_backward_is_refused_at_the_steps_end() -> None:
    """As behind a break after a number of batches: what its other shards brought would be dropped without a word."""
    worker = Worker(None)
    shards = worker.shards()
    worker.reducer.check_shards()  # as where nothing trains the model in a step
    for _ in range(3):
        worker.backward(next(shards))
    with pytest.raises(NotDeterministicError, match="the last one was of shard 2 of 6"):
        worker.reducer.check_shards()
    for places in shards:
        worker.backward(places)
    worker.reducer.check_shards()
    worker.reducer.step_committed()
    worker.backward(next(worker.shards()))
    worker.reducer.step_rolled_back()
    worker.reducer.check_shards()


def test_a_shard_without_a_backward_is_refused() -> None:
    worker = Worker(None)
    with pytest.raises(NotDeterministicError, match="had no backward"):
        for places in worker.shards():
            if places.start != 3:
                worker.backward(places)
