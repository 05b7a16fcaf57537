"""Weights that are exchanged on a device, in a step or beside the steps, are read and written in order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from bagua_core.algorithms import (
    AsyncModelAverage,
    Decentralized,
    LowPrecisionDecentralized,
    StreamingDiLoCo,
)
from bagua_core.algorithms.local_sgd import LocalSGD
from bagua_core.communication.communicator import Lane
from bagua_core.communication.devices import device_order
from bagua_core.communication.nccl.nccl_line import NcclOperation
from bagua_core.communication.transports.by_device import ByDevice
from bagua_core.communication.weights.background_average import Round
from tests.core.communication.in_process import build_in_process
from tests.core.communication.worlds import DEADLINE_S, run_ranks
from tests.streams.device_model import DeviceModel, ModelMoment, ModelStream
from tests.streams.modelled_ranks import (
    SCRIPT,
    ModelledRank,
    parameters,
    train,
    two_nodes,
    waits_of_steps,
    world,
)
from tests.streams.watching import belonging_to, clean, install, nccl_world

Made = Callable[[], list[ModelledRank]]


def small() -> nn.Module:
    return nn.Sequential(nn.Linear(70, 31), nn.Tanh(), nn.Linear(31, 3))


WORLDS: dict[str, Made] = {
    "decentralized": lambda: world(2, lambda: Decentralized(hierarchical=False), small),
    "decentralized in pairs": lambda: world(2, lambda: Decentralized(False, "shift_one"), small),
    "decentralized by node": lambda: two_nodes(lambda: Decentralized(hierarchical=True)),
    "low precision": lambda: world(3, lambda: LowPrecisionDecentralized(hierarchical=False), small),
    "low precision by node": lambda: two_nodes(lambda: LowPrecisionDecentralized(hierarchical=True)),
    "local SGD": lambda: world(2, lambda: LocalSGD(sync_every=2), small),
    "local SGD compressed": lambda: world(2, lambda: LocalSGD(sync_every=2, compress="uint8"), small),
}


@pytest.fixture(autouse=True)
def modelled(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)


@pytest.mark.parametrize("name", WORLDS)
def test_an_exchange_in_a_step_is_in_order(name: str) -> None:
    members = WORLDS[name]()
    train(members, steps=5)
    assert clean([m.device for m in members]) == []


@pytest.mark.parametrize("name", WORLDS)
def test_the_host_waits_once_a_step_for_an_exchange_and_once_for_the_vote(name: str) -> None:
    """The vote is a message of its own; in a job with GPUs it goes through Gloo, and no wait is for the device."""
    members = WORLDS[name]()
    train(members, steps=5)
    exchanges = [False, False, True, False, True] if name.startswith("local SGD") else [True] * 5
    waits = [1 + has_exchange for has_exchange in exchanges]
    assert waits_of_steps(members) == waits * len(members), members[0].steps_waits


@pytest.mark.parametrize("name", ["decentralized", "low precision by node"])
def test_an_exchange_without_events_is_reported(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(NcclOperation, "_come_after_start", lambda operation: None)
    members = WORLDS[name]()
    train(members, steps=3)
    assert any("unordered" in violation for violation in clean([m.device for m in members]))


# -- beside the steps


def beside_the_steps() -> list[ModelledRank]:
    """Trains with a round under way in each step."""
    lanes = frozenset({Lane.BACKGROUND})
    members = world(2, lambda: AsyncModelAverage(sync_interval_ms=0), small, lanes)
    for _ in range(4):
        train(members, steps=1)
        assert all(run_ranks(members, lambda m: m.exchange.wait_for_round(DEADLINE_S)))
    assert all(m.exchange.rounds >= 2 for m in members)
    return members


def test_a_round_beside_the_steps_is_in_order() -> None:
    assert clean([m.device for m in beside_the_steps()]) == []


def test_the_script_waits_for_its_vote_and_not_for_a_round() -> None:
    for member in beside_the_steps():
        scripts = [w for w in member.device.host_waits if not w.startswith("bagua-average")]
        assert len(scripts) == len(member.steps_waits), member.device.host_waits


def streaming(compress: str = "none") -> list[ModelledRank]:
    """Two fragments, each applied in the step after the one that sends it."""
    algorithm = StreamingDiLoCo(sync_every=2, fragments=2, delay=1, compress=compress)
    members = world(2, lambda: algorithm, small, algorithm.lanes)
    train(members, steps=7)
    assert all(m.exchange.rounds >= 4 for m in members)
    return members


@pytest.mark.parametrize("compress", ["none", "uint8", "int4"])
def test_fragments_that_are_exchanged_beside_the_steps_are_in_order(compress: str) -> None:
    members = streaming(compress)
    assert clean([m.device for m in members]) == []
    for member in members:
        scripts = [w for w in member.device.host_waits if not w.startswith("bagua-exchange")]
        assert len(scripts) == len(member.steps_waits), "the script waits for its vote alone"


@pytest.mark.parametrize(
    ("flaw", "report"),
    [
        ("a round begins before its inputs are there", "unordered"),
        ("a round is done before its work is", "unordered"),
        ("no device is set in a round's thread", "bagua-exchange works with device 0"),
    ],
)
def test_the_checker_reports_each_flaw_of_a_fragments_exchange(
    flaw: str, report: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_back(monkeypatch, flaw)
    found = clean([m.device for m in streaming()])
    assert any(report in violation for violation in found), found


def put_back(monkeypatch: pytest.MonkeyPatch, flaw: str) -> None:
    match flaw:
        case "a round begins before its inputs are there":
            after = device_order._after

            def unordered(order: Any, launched: Any, tensors: Any) -> Any:
                return after(order, device_order.PastMoment(), tensors)

            monkeypatch.setattr(device_order, "_after", unordered)
        case "a round is done before its work is":
            monkeypatch.setattr(ModelMoment, "wait", lambda moment, look: None)
        case "no device is set in a round's thread":
            monkeypatch.setattr(ModelStream, "on_it", lambda s: s.model.on(s.name, sets_device=False))
        case _:
            raise AssertionError(flaw)


@pytest.mark.parametrize(
    ("flaw", "report"),
    [
        ("a round begins before its inputs are there", "unordered"),
        ("a round is done before its work is", "unordered"),
        ("no device is set in a round's thread", "bagua-average works with device 0"),
    ],
)
def test_the_checker_reports_each_flaw_of_a_round(
    flaw: str, report: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_back(monkeypatch, flaw)
    found = clean([m.device for m in beside_the_steps()])
    assert any(report in violation for violation in found), found


def test_a_round_takes_no_part_in_nccls_order() -> None:
    """Its operations begin at another moment on each rank."""
    devices = [DeviceModel(index=rank + 1) for rank in range(2)]
    of_gpu = nccl_world(devices)
    of_cpu = build_in_process(2, abort_flags=[c.abort_flag for c in of_gpu])
    lanes = [ByDevice(cpu, gpu) for cpu, gpu in zip(of_cpu, of_gpu, strict=True)]

    def act(rank: int) -> list[float]:
        flat = devices[rank].tag(torch.full((100,), rank + 1.0), "flat")
        with belonging_to(devices[rank]), devices[rank].on("script"):
            flat.mul_(2.0)
            under_way = Round(lanes[rank], [flat])
            assert under_way.wait(DEADLINE_S) and under_way.error is None
            flat.add_(1.0)
        return flat.tolist()

    assert run_ranks([0, 1], act) == [[4.0] * 100] * 2
    assert clean(devices) == []
    assert not any(c._line.handle.calls for c in of_gpu)  # type: ignore[attr-defined]


def test_a_round_of_host_memory_waits_for_nothing() -> None:
    device = DeviceModel()
    (communicator,) = nccl_world([device])
    with belonging_to(device), device.on("script"):
        under_way = Round(communicator, [torch.ones(8)])
        assert under_way.wait(DEADLINE_S) and under_way.error is None


# -- at the end of a round


@pytest.mark.parametrize("compress", ["none", "uint8", "int4"])
def test_the_averages_of_rounds_are_in_order_and_the_host_waits_once_for_each_tensor(compress: str) -> None:
    members = world(2, lambda: LocalSGD(sync_every=2, compress=compress, unit="round"), small)

    def close(member: ModelledRank) -> list[str]:
        with belonging_to(member.device), member.device.on(SCRIPT), torch.no_grad():
            member.exchange.forward_begins()
            for parameter in member.rank.inner.parameters():
                parameter.mul_(1.5)  # local steps
            before = len(member.device.host_waits)
            member.exchange.close_round(member.communicator, 0.5)
            waits = member.device.host_waits[before:]
            member.exchange.step_committed()
            return waits

    for _ in range(3):
        for waits in run_ranks(members, close):
            assert len(waits) == 1, waits
    assert clean([m.device for m in members]) == []
    assert parameters(members)[0] and all(map(torch.equal, *parameters(members)))
