"""The job's gradient, whatever the shares, the micro-batches and the failures."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from bagua_core.communication.communicator import CollectiveFailed, Communicator, Pending, ReduceOp
from bagua_core.communication.reduction.backward_task import NestedBackwardError
from bagua_core.communication.reduction.contributions import SparseGradientError
from bagua_core.communication.reduction.reducer import Reducer
from bagua_core.communication.step_interface import MicroBatch
from tests.core.communication.in_process import InProcessCommunicator, build_in_process
from tests.core.communication.worlds import FakeEngine, gloo_world, in_process_world, run_ranks, seeded

X = torch.randn(12, 6, generator=torch.Generator().manual_seed(1))
Y = torch.randn(12, 3, generator=torch.Generator().manual_seed(2))


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))


def loss_of(model: nn.Module, begin: int, end: int) -> torch.Tensor:
    return nn.functional.mse_loss(model(X[begin:end]), Y[begin:end])


def gradients(model: nn.Module) -> list[torch.Tensor]:
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def whole_batch_gradients(begin: int = 0, end: int = 12) -> list[torch.Tensor]:
    model = seeded(net)
    loss_of(model, begin, end).backward()
    return gradients(model)


class Rank:
    """One worker: a model, its reducer with small buckets, and an engine that takes notes."""

    def __init__(
        self,
        communicator: Communicator | None,
        weight: float | None = None,
        build: Callable[[], nn.Module] = net,
        bucket_cap_bytes: int = 200,
    ) -> None:
        self.engine = FakeEngine(communicator, weight)
        self.model = seeded(build)
        self.reducer = Reducer(self.model.parameters(), self.engine, bucket_cap_bytes, first_bucket_bytes=64)

    @property
    def global_rank(self) -> int:
        communicator = self.engine.communicator()
        return communicator.global_rank if communicator else 0

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.model.zero_grad(set_to_none=set_to_none)


def ranks(
    world_size: int, weights: list[float] | None = None, build: Callable[[], nn.Module] = net
) -> list[Rank]:
    given: list[float | None] = [*weights] if weights else [None] * world_size
    return [Rank(c, w, build) for c, w in zip(in_process_world(world_size), given, strict=True)]


def assert_all_equal(members: list[Rank], expected: list[torch.Tensor]) -> None:
    first = gradients(members[0].model)
    for member in members[1:]:
        assert all(torch.equal(a, b) for a, b in zip(first, gradients(member.model), strict=True))
    for got, want in zip(first, expected, strict=True):
        torch.testing.assert_close(got, want)


SHARES = [(0, 5), (5, 12)]
WEIGHTS = [5 / 12, 7 / 12]


@pytest.mark.parametrize("set_to_none", [True, False])
def test_uneven_shares_give_the_mean_of_the_batch(set_to_none: bool) -> None:
    members = ranks(2, WEIGHTS)
    assert len(members[0].reducer.buckets_of_parameters()) > 2

    def act(r: Rank) -> None:
        for _ in range(3):
            r.zero_grad(set_to_none)
            loss_of(r.model, *SHARES[r.global_rank]).backward()

    run_ranks(members, act)
    assert_all_equal(members, whole_batch_gradients())


def test_over_gloo_too() -> None:
    members = [Rank(c, w) for c, w in zip(gloo_world(2), WEIGHTS, strict=True)]
    run_ranks(members, lambda r: loss_of(r.model, *SHARES[r.global_rank]).backward())
    assert_all_equal(members, whole_batch_gradients())


@pytest.mark.parametrize("set_to_none", [True, False])
def test_an_empty_share_is_replaced_by_zero(set_to_none: bool) -> None:
    members = ranks(2, [1.0, 0.0])

    def act(r: Rank) -> None:
        for _ in range(2):
            r.zero_grad(set_to_none)
            loss = loss_of(r.model, 0, 12)
            (loss if r.global_rank == 0 else loss * torch.nan).backward()

    run_ranks(members, act)
    assert_all_equal(members, whole_batch_gradients())


PARTS = [[(0, 3), (3, 5)], [(5, 9), (9, 12)]]


def micro_batches(r: Rank, parts: list[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    for number, (begin, end) in enumerate(parts):
        r.engine.begin_micro_batch(MicroBatch((end - begin) / 12, number == len(parts) - 1))
        yield begin, end


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("world_size", [1, 2])
def test_micro_batches_are_the_one_big_batch(world_size: int, set_to_none: bool) -> None:
    members = ranks(2) if world_size == 2 else [Rank(None)]

    def act(r: Rank) -> None:
        parts = PARTS[r.global_rank] if world_size == 2 else PARTS[0] + PARTS[1]
        for _ in range(3):
            for begin, end in micro_batches(r, parts):
                r.zero_grad(set_to_none)
                loss_of(r.model, begin, end).backward()
                if not r.engine.micro_batch.last:
                    assert all(not g.any() for g in gradients(r.model))

    run_ranks(members, act)
    assert_all_equal(members, whole_batch_gradients())
    assert all(len(m.engine.pairs) == 3 for m in members)


def test_an_empty_micro_batch_among_others() -> None:
    members = ranks(2)
    parts = [[(0, 6), (6, 9)], [(9, 12), (12, 12)]]

    def act(r: Rank) -> None:
        for _ in range(2):
            for begin, end in micro_batches(r, parts[r.global_rank]):
                r.zero_grad()
                loss_of(r.model, begin, end).backward()

    run_ranks(members, act)
    assert_all_equal(members, whole_batch_gradients())


@pytest.mark.parametrize("world_size", [1, 2])
def test_several_backwards_in_a_step_add_up(world_size: int) -> None:
    members = ranks(2, WEIGHTS) if world_size == 2 else [Rank(None)]

    def act(r: Rank) -> None:
        r.zero_grad()
        for _ in range(3):
            loss_of(r.model, *(SHARES[r.global_rank] if world_size == 2 else (0, 12))).backward()

    run_ranks(members, act)
    assert_all_equal(members, [3 * g for g in whole_batch_gradients()])


@pytest.mark.parametrize("world_size", [1, 2])
def test_several_backwards_in_a_step_of_micro_batches_add_up(world_size: int) -> None:
    members = ranks(2) if world_size == 2 else [Rank(None)]

    def act(r: Rank) -> None:
        parts = PARTS[r.global_rank] if world_size == 2 else PARTS[0] + PARTS[1]
        for _ in range(2):
            for begin, end in micro_batches(r, parts):
                r.zero_grad()
                for _ in range(3):
                    loss_of(r.model, begin, end).backward()

    run_ranks(members, act)
    assert_all_equal(members, [3 * g for g in whole_batch_gradients()])


def test_gradients_kept_local_are_reduced_with_the_next() -> None:
    members = ranks(2, WEIGHTS)

    def act(r: Rank) -> None:
        r.zero_grad()
        r.reducer.synced = False
        loss_of(r.model, *SHARES[r.global_rank]).backward()
        assert not r.engine.pairs
        r.reducer.synced = True
        loss_of(r.model, *SHARES[r.global_rank]).backward()

    run_ranks(members, act)
    assert_all_equal(members, [2 * g for g in whole_batch_gradients()])


class Branches(nn.Module):
    """Uses a branch only if told to; `never` is not used at all."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(6, 3)
        self.branch = nn.Linear(6, 3)
        self.never = nn.Parameter(torch.ones(2))

    def forward(self, x: torch.Tensor, with_branch: bool) -> torch.Tensor:
        y: torch.Tensor = self.trunk(x)
        return y + self.branch(x) if with_branch else y


@pytest.mark.parametrize("in_parts", [False, True])
def test_parameters_without_a_part_count_as_zero(in_parts: bool) -> None:
    members = ranks(2, WEIGHTS, Branches)

    def act(r: Rank) -> None:
        for _ in range(2):
            parts = PARTS[r.global_rank] if in_parts else [SHARES[r.global_rank]]
            for begin, end in micro_batches(r, parts):
                r.zero_grad()
                y = r.model(X[begin:end], with_branch=r.global_rank == 1)
                nn.functional.mse_loss(y, Y[begin:end]).backward()

    run_ranks(members, act)
    reference = seeded(Branches)
    for global_rank, (begin, end) in enumerate(SHARES):
        y = reference(X[begin:end], with_branch=global_rank == 1)
        (nn.functional.mse_loss(y, Y[begin:end]) * WEIGHTS[global_rank]).backward()
    reference.never.grad = torch.zeros(2)
    assert_all_equal(members, gradients(reference))


def test_shared_and_frozen_parameters_and_mixed_types() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(6, 6)
            self.wide = nn.Linear(6, 6).double()
            self.frozen = nn.Linear(6, 6)
            self.frozen.requires_grad_(False)
            self.again = self.first

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.again(self.frozen(torch.tanh(self.first(x))))
            z: torch.Tensor = self.wide(y.double()).float()[:, :3]
            return z

    members = ranks(2, WEIGHTS, Mixed)
    run_ranks(members, lambda r: loss_of(r.model, *SHARES[r.global_rank]).backward())
    reference = seeded(Mixed)
    loss_of(reference, 0, 12).backward()
    assert_all_equal(members, gradients(reference))
    assert members[0].model.frozen.weight.grad is None  # type: ignore[union-attr]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_switch_pair_is_summed_as_it_is(dtype: torch.dtype) -> None:
    members = ranks(3, [0.5, 0.5, 0.0], lambda: nn.Linear(6, 3).to(dtype))

    def act(r: Rank) -> None:
        for v in (0.0, 1.0 + r.global_rank, 3.0):
            r.engine.v = v
            r.model(X.to(dtype)).sum().backward()

    run_ranks(members, act)
    assert all(m.engine.pairs == [(0.0, 0.0), (6.0, 14.0), (9.0, 27.0)] for m in members)


def test_a_world_of_one_reduces_nothing() -> None:
    member = Rank(None)
    loss_of(member.model, 0, 12).backward()
    assert member.engine.pairs == [None]
    assert_all_equal([member], whole_batch_gradients())


def test_buckets_leave_in_one_order_whatever_fills_first() -> None:
    """The branch is used by one rank only, so its bucket, the first, fills at different moments."""
    order: list[list[int]] = [[], []]
    members = [Rank(c, None, Branches, bucket_cap_bytes=64) for c in in_process_world(2)]
    for member in members:
        communicator = member.engine.communicator()
        assert communicator is not None
        start = communicator.allreduce

        def noted(
            tensor: torch.Tensor,
            op: ReduceOp = ReduceOp.SUM,
            start: Callable[..., Pending] = start,
            to: list[int] = order[member.global_rank],
        ) -> Pending:
            to.append(tensor.numel())
            return start(tensor, op)

        communicator.allreduce = noted  # type: ignore[method-assign]
    run_ranks(members, lambda r: r.model(X, with_branch=r.global_rank == 1).sum().backward())
    assert order[0] == order[1]
    assert len(order[0]) == 3


def failing_world() -> tuple[list[Rank], list[InProcessCommunicator]]:
    world = build_in_process(2)
    return [Rank(c, w) for c, w in zip(world, WEIGHTS, strict=True)], world


def test_a_lost_peer_leaves_zeros_and_the_next_generation_goes_on() -> None:
    members, world = failing_world()
    run_ranks(members, lambda r: loss_of(r.model, *SHARES[r.global_rank]).backward())
    world[1].lose("10.0.0.9")
    survivor = members[0]
    before = [p.detach().clone() for p in survivor.model.parameters()]
    loss_of(survivor.model, 0, 12).backward()
    assert isinstance(survivor.engine.failed, CollectiveFailed)
    assert survivor.engine.failed.hosts == ("10.0.0.9",)
    assert all(not g.any() for g in gradients(survivor.model))
    assert len(gradients(survivor.model)) == 6
    # a further backward of the failed step starts nothing
    loss_of(survivor.model, 0, 12).backward()
    assert all(not g.any() for g in gradients(survivor.model))
    assert all(torch.equal(a, b) for a, b in zip(before, survivor.model.parameters(), strict=True))

    survivor.engine.enter(None)
    survivor.engine.current = MicroBatch(1.0, True)
    survivor.reducer.step_rolled_back()
    survivor.reducer.communicator_changed()
    survivor.zero_grad()
    loss_of(survivor.model, 0, 12).backward()
    assert_all_equal([survivor], whole_batch_gradients())


def test_what_was_abandoned_never_reaches_a_gradient() -> None:
    members, world = failing_world()
    survivor, late = members
    survivor.engine.stall_after_s = 0.01
    stalled = threading.Event()
    survivor.engine.stalls = _Noting(stalled)
    backward = threading.Thread(target=lambda: loss_of(survivor.model, *SHARES[0]).backward())
    backward.start()
    assert stalled.wait(5.0)
    world[0].abort("the peer is silent")
    backward.join(5.0)
    assert not backward.is_alive()
    assert survivor.engine.step_failed

    survivor.engine.enter(None)
    survivor.engine.current = MicroBatch(1.0, True)
    survivor.zero_grad(set_to_none=False)  # so that the gradients stay where the buckets are
    loss_of(survivor.model, 0, 12).backward()
    # only now the peer completes the operations of the old generation: they write into the old memory
    loss_of(late.model, *SHARES[1]).backward()
    assert late.engine.pairs
    assert_all_equal([survivor], whole_batch_gradients())


class _Noting(list[float]):
    def __init__(self, happened: threading.Event) -> None:
        super().__init__()
        self._happened = happened

    def append(self, waited_s: float) -> None:
        super().append(waited_s)
        self._happened.set()


def test_accumulations_of_a_step_that_failed_are_forgotten() -> None:
    member = Rank(None)
    member.engine.begin_micro_batch(MicroBatch(0.5, False))
    loss_of(member.model, 0, 6).backward()
    member.reducer.step_rolled_back()
    member.zero_grad()
    member.engine.begin_micro_batch(MicroBatch(1.0, True))
    loss_of(member.model, 0, 12).backward()
    assert_all_equal([member], whole_batch_gradients())


def test_a_gradient_outside_a_step_is_the_scripts_mistake() -> None:
    member = Rank(None)
    member.engine.in_step = False
    with pytest.raises(RuntimeError, match="outside a step"):
        loss_of(member.model, 0, 12).backward()


def test_sparse_gradients_are_refused() -> None:
    engine = FakeEngine(None)
    table = nn.Embedding(5, 2, sparse=True)
    Reducer(table.parameters(), engine)
    with pytest.raises(SparseGradientError, match="sparse=False"):
        table(torch.tensor([1, 2])).sum().backward()


def test_nothing_to_train_is_refused() -> None:
    with pytest.raises(ValueError, match="nothing to train"):
        Reducer([nn.Parameter(torch.ones(1), requires_grad=False)], FakeEngine(None))


class _Breaks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, gradient: torch.Tensor) -> torch.Tensor:
        raise ArithmeticError("a hook of the script")


def test_a_backward_that_raised_after_sending_fails_the_step() -> None:
    members = ranks(2)
    model = members[0].model
    assert isinstance(model, nn.Sequential)
    hidden = model[:2](X)
    with pytest.raises(ArithmeticError):
        model[2:](_Breaks.apply(hidden)).sum().backward()
    assert members[0].reducer.is_unfinished
    loss_of(model, 0, 12).backward()  # the script went on all the same
    assert isinstance(members[0].engine.failed, CollectiveFailed)
    assert "exception" in str(members[0].engine.failed)
    assert all(not g.any() for g in gradients(model))
    assert not members[0].reducer.is_unfinished


def test_a_backward_inside_a_backward_is_refused_by_name() -> None:
    member = Rank(None)
    model = member.model
    assert isinstance(model, nn.Sequential)
    hidden = checkpoint(model[:2], X.clone().requires_grad_(), use_reentrant=True)
    with pytest.raises(NestedBackwardError, match="use_reentrant=False"):
        model[2:](hidden).sum().backward()


def test_activation_checkpointing_without_reentrance() -> None:
    members = ranks(2, WEIGHTS)

    def act(r: Rank) -> None:
        begin, end = SHARES[r.global_rank]
        model = r.model
        assert isinstance(model, nn.Sequential)
        y = model[2:](checkpoint(model[:2], X[begin:end], use_reentrant=False))
        nn.functional.mse_loss(y, Y[begin:end]).backward()

    run_ranks(members, act)
    assert_all_equal(members, whole_batch_gradients())


@pytest.mark.filterwarnings("ignore:Using backward")
def test_a_graph_of_the_gradient_does_no_harm() -> None:
    members = ranks(2, WEIGHTS)
    run_ranks(members, lambda r: loss_of(r.model, *SHARES[r.global_rank]).backward(create_graph=True))
    assert_all_equal(members, whole_batch_gradients())
    assert all(not p.grad.requires_grad for m in members for p in m.model.parameters() if p.grad is not None)


def test_closed_it_leaves_the_parameters_alone() -> None:
    member = Rank(None)
    member.reducer.close()
    loss_of(member.model, 0, 12).backward()
    assert not member.engine.pairs
