"""A GradScaler's state can be kept and put back, as exactly as its state_dict, without reading it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.amp.grad_scaler import GradScaler

from bagua_core.elastic.state.state_registry import StateRegistry
from bagua_core.model.scaler_state import ScalerSnapshot, unchanged_scale
from tests.streams.device_model import DeviceModel
from tests.streams.watching import belonging_to, install


def used(scale: float = 1024.0) -> GradScaler:
    scaler = GradScaler("cpu", init_scale=scale, growth_interval=2)
    scaler.scale(torch.ones(1))
    return scaler


def step_with(scaler: GradScaler, gradient: float) -> None:
    parameter = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    scaler.scale(parameter * gradient).backward()
    scaler.step(optimizer)
    scaler.update()


@pytest.mark.parametrize("gradient", [1.0, float("inf")])
def test_a_step_is_undone(gradient: float) -> None:
    scaler = used()
    step_with(scaler, 1.0)
    before, snapshot, tensor = scaler.state_dict(), ScalerSnapshot(scaler), scaler._scale
    step_with(scaler, gradient)
    assert scaler.state_dict() != before
    snapshot.restore(scaler)
    assert scaler.state_dict() == before and scaler._scale is tensor
    step_with(scaler, gradient)
    snapshot.restore(scaler)
    assert scaler.state_dict() == before, "a snapshot is good for more than one failure"


def test_one_that_was_not_used_yet_is_as_before() -> None:
    scaler = GradScaler("cpu", init_scale=512.0)
    before, snapshot = scaler.state_dict(), ScalerSnapshot(scaler)
    step_with(scaler, float("inf"))
    assert scaler.state_dict() != before
    snapshot.restore(scaler)
    assert scaler.state_dict() == before
    step_with(scaler, 1.0)
    assert scaler.get_scale() == 512.0


def test_one_that_is_switched_off_has_none() -> None:
    scaler = GradScaler("cpu", enabled=False)
    ScalerSnapshot(scaler).restore(scaler)
    assert scaler.state_dict() == {}


def test_another_torch_is_asked_for_its_state() -> None:
    loaded: list[Any] = []
    other: Any = SimpleNamespace(
        is_enabled=lambda: True,
        state_dict=lambda: {"scale": 2.0},
        load_state_dict=loaded.append,
        get_scale=lambda: 2.0,
    )
    ScalerSnapshot(other).restore(other)
    assert loaded == [{"scale": 2.0}] and unchanged_scale(other) == 2.0


def test_the_same_scale_again_only_forgets_what_was_found() -> None:
    scaler = used(256.0)
    parameter = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    scaler.scale(parameter * float("inf")).backward()
    scaler.unscale_(optimizer)
    scaler.update(unchanged_scale(scaler))
    assert scaler.get_scale() == 256.0
    scaler.unscale_(optimizer)  # torch refuses it twice without an update between


def test_nothing_of_it_waits_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)
    device, scaler = DeviceModel(), used()
    for tensor in (scaler._scale, scaler._growth_tracker):
        assert tensor is not None
        device.tag(tensor, "scaler")
    with belonging_to(device), device.on("script"):
        scaler.state_dict()
        assert len(device.host_waits) == 2
        snapshot = ScalerSnapshot(scaler)
        scaler.update(unchanged_scale(scaler))
        snapshot.restore(scaler)
    assert len(device.host_waits) == 2 and device.violations == []


def test_a_step_of_a_registered_scaler_waits_for_nothing_either(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)
    device, scaler, registry = DeviceModel(), used(), StateRegistry()
    registry.register("scaler", scaler)
    for tensor in (scaler._scale, scaler._growth_tracker):
        assert tensor is not None
        device.tag(tensor, "scaler")
    with belonging_to(device), device.on("script"):
        registry.snapshot()
        registry.roll_back()
    assert device.host_waits == [] and device.violations == []
