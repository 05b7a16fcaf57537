"""A round's average follows the formulas, also of workers with uneven samples, and a failed one changes nothing."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest
import torch
from torch import nn

from bagua_core.algorithms import LocalSGD
from bagua_core.algorithms.algorithm import Attachment
from bagua_core.communication.communicator import CollectiveFailed, Communicator
from bagua_core.communication.compressed import feedback_sum
from bagua_core.communication.devices.device_wait import Followed
from bagua_core.parallel import DistributedDataParallel
from bagua_core.sync_batchnorm import SyncBatchNorm
from tests.core.communication.in_process import build_in_process
from tests.core.communication.worlds import FakeEngine, gloo_world, run_ranks

SAMPLES = (30, 10, 0)
PIECE = 50  # of 127 values
FP32 = slice(0, 120)  # of the parameters' values; the others are rounded to half precision after each average
# What one byte a value may differ by, of changes as large as those here; it goes through two rounds.
LOSS_OF_UINT8 = 0.05
LOSS_OF_INT4 = 0.9


class Member:
    """One worker's exchange and parameters: of two shapes, one in half precision."""

    def __init__(self, communicator: Communicator, algorithm: LocalSGD, forwards: bool = True) -> None:
        self.communicator = communicator
        self.rank = communicator.global_rank
        generator = torch.Generator().manual_seed(0)
        wide = torch.randn(40, 3, generator=generator)
        self.parameters = (nn.Parameter(wide), nn.Parameter(torch.randn(7, generator=generator).bfloat16()))
        self.engine = FakeEngine(communicator)
        self.exchange = algorithm.attach(Attachment(self.parameters, [], self.engine, 1 << 20))
        if forwards:
            self.exchange.forward_begins()

    def learn(self, number: int) -> None:
        for k, parameter in enumerate(self.parameters):
            change = torch.randn(
                parameter.shape, generator=torch.Generator().manual_seed(100 * number + 10 * self.rank + k)
            )
            parameter.data.add_(change.to(parameter.dtype))

    def close(self, samples: Sequence[int] = SAMPLES) -> None:
        self.exchange.close_round(self.communicator, samples[self.rank] / sum(samples))

    @property
    def anchor(self) -> torch.Tensor:
        return self.exchange.travelling()["anchor.0"].clone()

    @property
    def model(self) -> torch.Tensor:
        return torch.cat([p.detach().float().reshape(-1) for p in self.parameters])

    def rounded(self, flat: torch.Tensor) -> torch.Tensor:
        """As the parameters' data types hold it."""
        parts = flat.split([p.numel() for p in self.parameters])
        return torch.cat([v.to(p.dtype).float() for v, p in zip(parts, self.parameters, strict=True)])


@pytest.fixture(params=["whole", "in pieces"])
def cut(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """How many values travel at a time."""
    if request.param == "in pieces":
        monkeypatch.setattr(feedback_sum, "_LEAST_PIECE", PIECE)
        assert [len(p) for p in torch.zeros(127).split(feedback_sum.piece_size(127, 2))] == [50, 50, 27]


def members(algorithm: LocalSGD, count: int = 3, forwards: bool = True) -> list[Member]:
    """forwards: the first of each has begun."""
    return [Member(communicator, algorithm, forwards) for communicator in build_in_process(count)]


def test_a_newcomer_in_the_very_first_round_takes_the_same_anchor() -> None:
    """Its copy is read at the begin of the holder's step, before the first forward there."""
    holder, newcomer = world = members(LocalSGD(unit="round"), 2, forwards=False)
    for flat in (
        f for member in world for f in member.exchange.travelling().values() if f.is_floating_point()
    ):
        flat.fill_(float("nan"))  # as memory that was never written
    newcomer.learn(0)  # a model of its own
    holder.exchange.copy_begins()
    copied = {name: tensor.clone() for name, tensor in holder.exchange.travelling().items()}
    model = [parameter.detach().clone() for parameter in holder.parameters]
    holder.exchange.forward_begins()
    holder.learn(1)

    def close(member: Member) -> None:
        member.close((30, 0))
        if member is newcomer:  # with the first reduction
            for name, tensor in member.exchange.travelling().items():
                tensor.copy_(copied[name])
            for parameter, value in zip(member.parameters, model, strict=True):
                parameter.data.copy_(value)
        member.exchange.step_committed()

    run_ranks(world, close)
    for name, tensor in holder.exchange.travelling().items():
        assert torch.equal(tensor, newcomer.exchange.travelling()[name]), name
    assert torch.isfinite(holder.anchor).all() and torch.equal(holder.model, newcomer.model)


def test_the_begin_of_a_round_without_a_forward_is_the_model_as_it_is() -> None:
    (alone,) = members(LocalSGD(unit="round"), 1, forwards=False)
    for flat in (f for f in alone.exchange.travelling().values() if f.is_floating_point()):
        flat.fill_(float("nan"))
    before = alone.model
    with alone.exchange.at_round_begin():
        assert torch.equal(alone.model, before)
    assert torch.equal(alone.model, before)


def test_a_worker_that_joins_again_sends_no_error_of_its_earlier_model() -> None:
    """Its clock is that of the round in which it was left out, and it copies the state beside the round."""

    def average(again: bool) -> torch.Tensor:
        holder, joiner = world = members(LocalSGD(unit="round", compress="int4"), 2)

        def round_of(member: Member) -> None:
            member.learn(1)
            member.close((30, 10))
            member.exchange.step_committed()

        run_ranks(world, round_of)
        if again:
            joiner.exchange.state_replaced()
        else:
            joiner = Member(joiner.communicator, LocalSGD(unit="round", compress="int4"))
        holder.learn(2)
        run_ranks([holder, joiner], lambda member: member.close((30, 0)))
        holder.exchange.step_committed()
        return holder.model

    assert torch.equal(average(again=True), average(again=False))


@pytest.mark.parametrize("outer", [None, "nesterov"])
@pytest.mark.parametrize("compress", ["none", "uint8", "int4"])
@pytest.mark.usefixtures("cut")
def test_anchors_are_those_of_one_process_and_equal_bit_for_bit(outer: str | None, compress: str) -> None:
    algorithm = LocalSGD(
        outer_optimizer=outer, outer_lr=0.7, outer_momentum=0.8, compress=compress, unit="round"
    )
    world = members(algorithm)
    expected = nn.Parameter(world[0].anchor)
    reference = torch.optim.SGD([expected], 0.7, 0.8, nesterov=True)
    for number in range(3):
        for member in world:
            if SAMPLES[member.rank]:
                member.learn(number)
        distances = torch.stack([member.model - expected.detach() for member in world])
        mean = torch.tensor(SAMPLES).div(sum(SAMPLES)) @ distances
        run_ranks(world, lambda member: member.close())
        for member in world:
            member.exchange.step_committed()
        if outer is None:
            expected.data.add_(mean)
        else:
            expected.grad = -mean
            reference.step()
        for member in world:
            assert torch.equal(member.anchor, world[0].anchor)
            atol = {"none": 1e-5, "uint8": LOSS_OF_UINT8, "int4": LOSS_OF_INT4}[compress]
            torch.testing.assert_close(member.anchor, expected.detach(), rtol=1e-4, atol=atol)
            assert torch.equal(member.model, member.rounded(member.anchor))
        expected.data.copy_(world[0].anchor)  # what compression lost is no part of the next round's reference


def test_a_member_without_samples_contributes_nothing_even_if_its_model_is_not_finite() -> None:
    world = members(LocalSGD(unit="round"))
    world[2].parameters[0].data.fill_(float("nan"))
    run_ranks(world, lambda member: member.close())
    for member in world:
        member.exchange.step_committed()
        assert torch.isfinite(member.parameters[0]).all()


def test_a_round_that_was_not_committed_keeps_models_and_anchors_and_is_averaged_again() -> None:
    world = members(LocalSGD(outer_optimizer="nesterov", unit="round"))
    for member in world:
        member.learn(0)
    models, anchor = [member.model for member in world], world[0].anchor
    run_ranks(world, lambda member: member.close())
    for member, model in zip(world, models, strict=True):
        member.exchange.step_rolled_back()
        assert torch.equal(member.model, model)
        assert torch.equal(member.anchor, anchor)
    run_ranks(world, lambda member: member.close((1, 1, 1)))
    for member in world:
        member.exchange.step_committed()
    assert not torch.equal(world[0].anchor, anchor)
    assert torch.equal(world[0].anchor, world[2].anchor)


def average(world: list[Member], samples: Sequence[int] = SAMPLES) -> None:
    run_ranks(world, lambda member: member.close(samples))
    for member in world:
        member.exchange.step_committed()


@pytest.mark.parametrize("compress", ["uint8", "int4"])
@pytest.mark.usefixtures("cut")
def test_what_compression_loses_is_sent_by_the_following_averages(compress: str) -> None:
    world = members(LocalSGD(compress=compress, unit="round"))
    expected = world[0].anchor
    for member in world:
        member.learn(0)
    for member, part in zip(world, (0.75, 0.25, 0.0), strict=True):
        expected.add_(member.model - world[0].anchor, alpha=part)
    average(world)
    first = (world[0].anchor - expected)[FP32].abs().max()
    for _ in range(5):  # no further local steps: only errors travel
        average(world)
    assert first > 0 and (world[0].anchor - expected)[FP32].abs().max() < first / 20


def test_an_error_belongs_to_one_anchor_and_is_added_where_a_member_goes_on_alone() -> None:
    world = members(LocalSGD(compress="int4", unit="round"))
    for member in world:
        member.learn(0)
    average(world)
    alone, behind = world[0], world[1]
    before, error = alone.anchor, alone.exchange._own_errors()[0].clone()
    assert error.any() and behind.exchange._own_errors()
    alone.exchange.close_round(None, 1.0)
    alone.exchange.step_committed()
    torch.testing.assert_close((alone.anchor - before)[FP32], error[FP32], rtol=1e-5, atol=1e-5)
    assert not alone.exchange._own_errors()
    for name, tensor in behind.exchange.travelling().items():  # it copies the other's state
        tensor.copy_(alone.exchange.travelling()[name])
    assert not behind.exchange._own_errors()


@pytest.mark.usefixtures("cut")
def test_a_failed_average_leaves_the_errors_as_they_were() -> None:
    world = members(LocalSGD(compress="int4", unit="round"))
    for member in world:
        member.learn(0)
    average(world)
    before = [member.exchange._own_errors()[0].clone() for member in world]
    run_ranks(world, lambda member: member.close())
    for member, error in zip(world, before, strict=True):
        member.exchange.step_rolled_back()
        assert torch.equal(member.exchange._own_errors()[0], error)


@pytest.mark.usefixtures("cut")
def test_over_gloo() -> None:
    world = [Member(c, LocalSGD(compress="uint8", unit="round")) for c in gloo_world(2)]
    for member in world:
        member.learn(0)
    run_ranks(world, lambda member: member.close((3, 1)))
    for member in world:
        member.exchange.step_committed()
    assert torch.equal(world[0].anchor, world[1].anchor)


@pytest.mark.usefixtures("cut")
def test_an_average_that_ends_in_the_middle_is_repeated_with_the_same_errors() -> None:
    first, second = (Member(c, LocalSGD(compress="uint8", unit="round")) for c in gloo_world(2))
    for member in (first, second):
        member.learn(0)
    run_ranks([first, second], lambda member: member.close((3, 1)))
    for member in (first, second):
        member.exchange.step_committed()
    (before,) = first.exchange._own_errors()
    kept, model = before.clone(), first.model
    timer = threading.Timer(0.2, lambda: first.communicator.abort("the other one is gone"))
    timer.start()
    with pytest.raises(CollectiveFailed, match="the other one is gone"):
        first.close((3, 1))
    timer.join()
    first.exchange.step_rolled_back()
    assert torch.equal(first.exchange._own_errors()[0], kept)
    assert torch.equal(first.model, model)
    (again,) = (Member(c, LocalSGD(compress="uint8", unit="round")) for c in build_in_process(1))
    first.exchange.close_round(again.communicator, 1.0)
    first.exchange.step_committed()
    assert first.anchor.isfinite().all()


def test_unknown_units_and_synchronized_batch_norm_are_refused() -> None:
    with pytest.raises(ValueError, match="unit='rounds' is unknown"):
        LocalSGD(unit="rounds")
    with pytest.raises(ValueError, match=r'compress="int4" needs unit="round"'):
        LocalSGD(compress="int4")
    net = nn.Sequential(nn.Linear(2, 2), SyncBatchNorm(2))
    with pytest.raises(ValueError, match="SyncBatchNorm communicates in every forward"):
        DistributedDataParallel(
            net, [torch.optim.SGD(net.parameters(), 0.1)], LocalSGD(unit="round"), engine=FakeEngine()
        )


def test_buffers_are_those_of_the_named_member_and_the_host_waits_for_them() -> None:
    """A failed close gives no buffers back, so none may be written before they are known to have come in."""
    members = []
    for communicator in build_in_process(2):
        net = nn.BatchNorm1d(3)
        assert net.running_mean is not None
        net.running_mean.fill_(communicator.global_rank)
        engine = FakeEngine(communicator)
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        members.append(DistributedDataParallel(net, [optimizer], LocalSGD(unit="round"), engine=engine))
    awaited: list[object] = []

    def close(model: DistributedDataParallel) -> list[float]:
        engine = model._engine
        assert isinstance(engine, FakeEngine)
        wait = engine.wait
        engine.wait = lambda pending: (awaited.append(type(pending)), wait(pending))[1]  # type: ignore[method-assign]
        communicator = engine.communicator()
        assert communicator is not None
        model.close_round(communicator, float(communicator.global_rank), 1)
        means: list[float] = model.module.running_mean.tolist()
        return means

    assert run_ranks(members, close) == [[1.0] * 3] * 2
    assert awaited and Followed not in awaited
