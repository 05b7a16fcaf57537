"""Only operations that sum a bucket exactly carry the switch pair; every other operation leaves it to the reducer."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from bagua_core.algorithms.momentum_sum import MomentumSum
from bagua_core.communication.communicator import Communicator, Pending
from bagua_core.communication.compressed.compressed_sum import CompressedSum
from bagua_core.communication.reduction.bucket_buffer import Bucket
from bagua_core.communication.reduction.bucket_operation import BucketOperation, LocalMean, Sum
from bagua_core.communication.reduction.reducer import Reducer
from bagua_core.communication.reduction.step_tail import PairNotCarried
from bagua_core.communication.topology.hierarchical_sum import HierarchicalSum
from tests.core.communication.worlds import FakeEngine, in_process_world, run_ranks, seeded


class _Then(Pending):
    """A pending operation with an action at its end."""

    def __init__(self, inner: Pending, action: Callable[[], object]) -> None:
        self._inner, self._action = inner, action

    def wait(self, stalled: Callable[[float], None] | None = None, stall_after_s: float = 0.5) -> None:
        self._inner.wait(stalled, stall_after_s)
        self._action()

    def is_done(self) -> bool:
        return self._inner.is_done()


class Halved(BucketOperation):
    """A script's operation that says nothing of the switch pair and changes all of the bucket's memory."""

    def launch(
        self, communicator: Communicator | None, bucket: Bucket, number: int, weight: float
    ) -> Pending:
        assert communicator is not None
        return _Then(communicator.allreduce(bucket.reducible), lambda: bucket.flat.mul_(0.5))


class HalvedSum(Sum):
    """A subclass of an exact sum that is none itself."""

    def launch(
        self, communicator: Communicator | None, bucket: Bucket, number: int, weight: float
    ) -> Pending:
        return _Then(super().launch(communicator, bucket, number, weight), lambda: bucket.flat.mul_(0.5))


@pytest.mark.parametrize("operation", [Halved, HalvedSum])
def test_an_operation_that_says_nothing_of_the_pair_does_not_touch_it(
    operation: type[BucketOperation],
) -> None:
    engines = [FakeEngine(c) for c in in_process_world(3)]
    models = [seeded(lambda: nn.Linear(2, 1)) for _ in engines]
    for model, engine in zip(models, engines, strict=True):
        Reducer(model.parameters(), engine, operation=operation())

    def act(rank: int) -> None:
        engines[rank].v = 2.0
        models[rank](torch.ones(1, 2)).sum().backward()

    run_ranks(range(3), act)
    assert all(engine.pairs == [(6.0, 12.0)] for engine in engines)
    assert all(torch.equal(model.weight.grad, torch.full((1, 2), 0.5)) for model in models)


def test_a_subclass_that_launches_by_itself_must_say_that_it_sums_exactly() -> None:
    class Exact(HalvedSum):
        carries_pair = True

    class Renamed(Exact):
        pass

    assert [k.carries_pair for k in (BucketOperation, Halved, HalvedSum, LocalMean)] == [False] * 4
    assert [k.carries_pair for k in (Exact, Renamed, Sum, HierarchicalSum, CompressedSum, MomentumSum)] == [
        True
    ] * 6


class ClaimsToCarry(Halved):
    """Changes the tail after the sum, and says that it carries it."""

    carries_pair = True


class Alone(LocalMean):
    """Sums nothing, and says that it carries the pair."""

    carries_pair = True


class InHalfPrecision(BucketOperation):
    """Sums what half precision leaves of the bucket."""

    carries_pair = True

    def launch(
        self, communicator: Communicator | None, bucket: Bucket, number: int, weight: float
    ) -> Pending:
        assert communicator is not None
        half = bucket.flat.half()
        return _Then(communicator.allreduce(half), lambda: bucket.flat.copy_(half))


class Signs(BucketOperation):
    """The sign of each sum."""

    carries_pair = True

    def launch(
        self, communicator: Communicator | None, bucket: Bucket, number: int, weight: float
    ) -> Pending:
        assert communicator is not None
        return _Then(communicator.allreduce(bucket.reducible), lambda: bucket.flat.sign_())


@pytest.mark.parametrize("operation", [ClaimsToCarry, Alone, InHalfPrecision, Signs])
def test_an_operation_that_wrongly_says_that_it_carries_the_pair_is_named(
    operation: type[BucketOperation],
) -> None:
    engines = [FakeEngine(c) for c in in_process_world(2)]
    models = [seeded(lambda: nn.Linear(2, 1)) for _ in engines]
    for model, engine in zip(models, engines, strict=True):
        Reducer(model.parameters(), engine, operation=operation())

    def act(rank: int) -> None:
        with pytest.raises(PairNotCarried, match=rf"{operation.__qualname__} sets carries_pair = True"):
            models[rank](torch.ones(1, 2)).sum().backward()

    run_ranks(range(2), act)
    assert all(engine.pairs == [] for engine in engines)
