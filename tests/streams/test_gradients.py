"""Gradients that are reduced on a device are read and written in order, and the host waits for it once a step."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch

from bagua_core.algorithms import late_elements
from bagua_core.algorithms.bytegrad import ByteGrad
from bagua_core.algorithms.gradient_allreduce import GradientAllreduce
from bagua_core.algorithms.qadam_optimizer import FREEZE_EVERY
from bagua_core.communication.communicator import Communicator
from bagua_core.communication.compressed.compressed_sum import CompressedSum, Load, is_compressed
from bagua_core.communication.devices.device_order import Moment
from bagua_core.communication.devices.device_wait import Followed, StallReports
from bagua_core.communication.nccl.nccl_line import NcclOperation
from bagua_core.communication.reduction import operation_queue
from bagua_core.communication.reduction.operation_queue import Job
from bagua_core.communication.topology.routes import route_of
from tests.core.algorithms.gradient_ranks import assert_equal_bits, net
from tests.streams.device_model import DeviceModel, ModelStream
from tests.streams.modelled_ranks import (
    ModelledRank,
    parameters,
    train,
    two_nodes,
    waits_of_steps,
    world,
    world_with_qadam,
)
from tests.streams.watching import active_model, belonging_to, clean, install

Made = Callable[[], list[ModelledRank]]
WORLDS: dict[str, Made] = {
    "allreduce": lambda: world(2, lambda: GradientAllreduce(hierarchical=False)),
    "allreduce by node": lambda: two_nodes(lambda: GradientAllreduce(hierarchical=True)),
    "bytegrad": lambda: world(3, lambda: ByteGrad(hierarchical=False)),
    "bytegrad by node": lambda: two_nodes(lambda: ByteGrad(hierarchical=True)),
}


def dead_inputs() -> torch.nn.Module:
    """Some of the first layer's weights never have a gradient."""
    built = net()
    layer: Any = built[0]
    mask = torch.ones_like(layer.weight)
    mask[:10] = 0
    layer.weight.register_hook(lambda gradient: gradient * mask)
    return built


@pytest.fixture(autouse=True)
def modelled(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)


@pytest.mark.parametrize("name", WORLDS)
def test_every_access_comes_after_what_it_depends_on(name: str) -> None:
    members = WORLDS[name]()
    train(members)
    assert clean([m.device for m in members]) == []
    assert_equal_bits(parameters(members))
    assert len(members[0].exchange._buckets) >= 3


@pytest.mark.parametrize("name", WORLDS)
def test_the_host_waits_once_a_step(name: str) -> None:
    members = WORLDS[name]()
    train(members)
    assert waits_of_steps(members) == [1] * (3 * len(members)), [m.device.host_waits for m in members]


@pytest.mark.parametrize(
    "flaw", ["the reducer waits for each bucket", "the operation queue waits for each collective"]
)
def test_further_waits_are_counted(flaw: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if flaw == "the operation queue waits for each collective":
        monkeypatch.setattr(NcclOperation, "follow", NcclOperation.wait)
    else:
        monkeypatch.setattr(Followed, "wait", lambda followed, *reports: followed._pending.wait(*reports))
    members = WORLDS["bytegrad"]()
    train(members, steps=1)
    assert min(waits_of_steps(members)) > 1


@pytest.mark.parametrize("bits", [8, 1])
def test_qadam_is_in_order_in_and_after_its_warm_up(bits: int) -> None:
    members = world_with_qadam(2, bits)
    train(members, steps=6)
    assert clean([m.device for m in members]) == []
    assert_equal_bits(parameters(members))


WARM_UP, FROZEN = 2, 6  # steps of world_with_qadam


@pytest.mark.parametrize("bits", [8, 1])
def test_the_host_waits_once_a_step_for_qadam(bits: int) -> None:
    """Also where the warm-up ends: how many elements are late comes to the host with the next step."""
    members = world_with_qadam(2, bits)
    train(members, steps=FROZEN)
    assert waits_of_steps(members) == [1] * FROZEN * len(members), members[0].steps_waits
    assert all(r.exchange._operation._optimizer.is_warm(list(r.rank.inner.parameters())) for r in members)
    assert clean([m.device for m in members]) == []


@pytest.mark.parametrize("whole", [0, late_elements.WHOLE], ids=["many", "few"])
@pytest.mark.parametrize("bits", [8, 1])
def test_many_late_elements_cost_one_wait_for_each_of_their_buckets_and_few_none(
    bits: int, whole: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(late_elements, "WHOLE", whole)
    members = world_with_qadam(2, bits, dead_inputs)
    train(members, steps=WARM_UP + FREEZE_EVERY + 2)
    optimizer: Any = members[0].rank.optimizer
    assert [optimizer.late_count(p) > 0 for p in members[0].rank.inner.parameters()].count(True) == 1
    waits = [len(waits) for waits in members[0].steps_waits]
    with_late = 1 if whole else 2
    assert waits == [1] * (WARM_UP + 1) + [with_late] * (FREEZE_EVERY + 1), members[0].steps_waits
    assert_equal_bits(parameters(members))
    assert clean([m.device for m in members]) == []


@pytest.mark.parametrize("operation", ["mask", "put by mask", "nonzero", "equal"])
def test_a_shape_that_follows_from_values_is_counted_as_a_wait(operation: str) -> None:
    (member,) = world(1, lambda: ByteGrad(hierarchical=False))
    positive = int((next(iter(member.rank.inner.parameters())) > 0).sum())
    with belonging_to(member.device), member.device.on("script"):
        values = next(iter(member.rank.inner.parameters())).detach().view(-1)
        mask = values > 0
        others = values.clone()[:positive]
        assert not member.device.host_waits
        match operation:
            case "mask":
                values[mask]
            case "put by mask":
                values[mask] = others
            case "nonzero":
                mask.nonzero()
            case "equal":
                torch.equal(values, values.clone())
    assert len(member.device.host_waits) == 1


class Watched(CompressedSum):
    """Keeps whether a bucket's sums hold NaN, for the next step."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.flags: list[torch.Tensor] = []

    def _sum(self, communicator: Communicator, load: Load) -> Job:
        route = route_of(communicator, False)
        if not is_compressed(load.plan, route):
            yield communicator.allreduce(load.reducible)
            return
        messages = yield from self._exchange(load, route)
        messages.decompress(messages.gathered)
        self.flags.append(messages.nan_flag())
        messages.give_back()


@pytest.mark.parametrize("lost", [False, True])
def test_whether_sums_hold_nan_is_known_a_step_late_without_a_wait(
    lost: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    members = world(2, lambda: ByteGrad(hierarchical=False))
    for member in members:
        old = member.exchange._operation
        member.exchange._operation = Watched(old._operations, old._compression, False)
    if lost:
        weight = next(iter(members[0].rank.inner.parameters()))
        with torch.no_grad():
            weight[0, 0] = torch.nan
    train(members, steps=1)
    assert waits_of_steps(members) == [1, 1]
    for member in members:
        with belonging_to(member.device), member.device.on("script"):
            assert any(bool(flag) for flag in member.exchange._operation.flags) is lost
    assert clean([m.device for m in members]) == [] and waits_of_steps(members) == [1, 1]
    assert all(len(m.device.host_waits) == 1 for m in members)


def test_a_bucket_stays_the_queues_until_its_stream_is_done_with_it() -> None:
    members = WORLDS["bytegrad"]()
    train(members, steps=1)
    for member in members:
        kept = {
            address for stream, address in member.device.kept if stream.startswith("side:bagua-operations")
        }
        buckets = {b.flat.untyped_storage().data_ptr() for b in member.exchange._buckets}
        assert buckets <= kept


# -- the flaws, put back


def nothing(*_: Any) -> None:
    return None


class CallersStream:
    """No stream of the operation queue's own: jobs run on whatever stream and device its thread has."""

    def __init__(self, model: DeviceModel) -> None:
        self._model = model

    def on_it(self) -> AbstractContextManager[None]:
        return nullcontext()

    def mark(self) -> Moment:
        return self._model.moment(self._model.current)

    def uses(self, tensor: torch.Tensor) -> None:
        return None


def without_stream(*_: Any) -> CallersStream:
    model = active_model()
    assert model is not None
    return CallersStream(model)


def without_device(stream: ModelStream) -> AbstractContextManager[None]:
    return stream.model.on(stream.name, sets_device=False)


def put_back(monkeypatch: pytest.MonkeyPatch, flaw: str) -> None:
    match flaw:
        case "no event at the launch of a job":
            monkeypatch.setattr(operation_queue._Ticket, "_come_after_launch", nothing)
        case "no event where a job is waited for":
            monkeypatch.setattr(operation_queue._Ticket, "_come_before_waiter", nothing)
        case "jobs on the operation queue thread's default stream":
            monkeypatch.setattr(operation_queue._Batch, "_stream_of", without_stream)
        case "no device is set in the operation queue's thread":
            monkeypatch.setattr(ModelStream, "on_it", without_device)
        case "no event at the start of a collective":
            monkeypatch.setattr(NcclOperation, "_come_after_start", nothing)
        case "no event after a collective":
            monkeypatch.setattr(NcclOperation, "follow", only_given)
        case _:
            raise AssertionError(flaw)


def only_given(operation: NcclOperation, *_: Any) -> None:
    operation._given_to_gpu(StallReports(None, 1.0))


IN_OPERATION_QUEUE = ("bytegrad", "bytegrad by node", "allreduce by node")
FLAWS = [
    ("no event at the launch of a job", IN_OPERATION_QUEUE, "unordered"),
    ("no event where a job is waited for", IN_OPERATION_QUEUE, "unordered"),
    ("jobs on the operation queue thread's default stream", IN_OPERATION_QUEUE, "works with device 0"),
    (
        "no device is set in the operation queue's thread",
        IN_OPERATION_QUEUE,
        "bagua-operations works with device 0",
    ),
    ("no event at the start of a collective", tuple(WORLDS), "unordered"),
    ("no event after a collective", tuple(WORLDS), "unordered"),
]


@pytest.mark.parametrize(
    ("flaw", "name", "report"), [(flaw, name, report) for flaw, names, report in FLAWS for name in names]
)
def test_the_checker_reports_each_flaw(
    flaw: str, name: str, report: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_back(monkeypatch, flaw)
    members = WORLDS[name]()
    train(members)
    found = clean([m.device for m in members])
    assert any(report in violation for violation in found), found


def test_a_read_of_a_value_is_counted_as_a_wait() -> None:
    (member,) = world(1, lambda: ByteGrad(hierarchical=False))
    with belonging_to(member.device), member.device.on("script"):
        value = next(iter(member.rank.inner.parameters())).detach().sum()
        value.item()
        value.reshape(1).tolist()
    assert len(member.device.host_waits) == 2
