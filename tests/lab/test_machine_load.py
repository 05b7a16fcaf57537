"""Bounds grow with the work of others on the machine, and a wait that is in vain still ends."""

from __future__ import annotations

import itertools
import time

import pytest

from tests.lab import machine_load
from tests.lab.machine_load import MachineLoad, crowding
from tests.lab.wait import eventually


def test_crowding_is_at_least_one_and_the_mean_is_of_what_was_sampled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert crowding() >= 1.0
    levels = itertools.chain([1.0, 3.0, 5.0], itertools.repeat(3.0))
    monkeypatch.setattr(machine_load, "_SAMPLE_EVERY_S", 0.001)
    began_s = time.monotonic()
    load = MachineLoad(lambda: next(levels))
    load.start()
    assert load.mean_since(time.monotonic() + 60) == 1.0
    eventually(lambda: load.mean_since(began_s) == 3.0, 10, "three levels and more were sampled")
    load.stop()
    load.stop()


def test_bounds_are_longer_on_a_slow_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    times_s = iter([0.05, 0.03, 0.04])
    monkeypatch.setattr(machine_load, "_ADDITIONS_S", 0.01)
    monkeypatch.setattr(machine_load, "_additions_s", lambda: next(times_s))
    monkeypatch.setattr(machine_load, "slowness", machine_load.slowness.__wrapped__)
    assert crowding() >= 3.0


def test_a_wait_lasts_longer_on_a_busy_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_load, "crowding", lambda: 4.0)
    began_s = time.monotonic()
    with pytest.raises(AssertionError, match=r"not within 0\.1 s of a machine that is not busy \(0\.[4-9]"):
        eventually(lambda: False, 0.1, "never")
    assert time.monotonic() - began_s >= 0.4
