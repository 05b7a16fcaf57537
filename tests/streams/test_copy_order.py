"""A copy of the state runs beside the step, on a thread that takes over the device work of the script's."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from bagua_core.communication.devices import device_order
from bagua_core.communication.devices.device_order import HostOrder
from bagua_core.elastic.heal import heal, pinned_chunks
from bagua_core.elastic.heal.received_state import InPlace
from tests.core.communication.in_process import build_in_process
from tests.core.communication.worlds import DEADLINE_S
from tests.streams.device_model import DeviceModel
from tests.streams.watching import belonging_to, install


@pytest.fixture(autouse=True)
def modelled(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)


class Side:
    """One end of a copy. live: its parameter, on its device."""

    def __init__(self, index: int) -> None:
        self.device = DeviceModel(index)
        self.live = self.device.tag(torch.zeros(5000), "live")
        self._changed = threading.Condition()

    def state(self) -> Any:
        return {"modules": [{"parameter.w": self.live}], "optimizers": []}

    def in_step(self, copy: Callable[[], Any]) -> None:
        """Work before the copy, the copy beside it, and work with its result."""
        with belonging_to(self.device), self.device.on("script"):
            self.live.add_(float(self.device.index))
            transfer = heal.Transfer(copy, self._changed)
            with self._changed:
                assert self._changed.wait_for(lambda: transfer.done, DEADLINE_S)
            assert transfer.error is None, transfer.error
            self.live.mul_(2.0)


def copied(holders: int = 1) -> list[Side]:
    """The holders, and the newcomer."""
    sides = [Side(index) for index in range(1, holders + 2)]
    newcomer, ends = sides[-1], build_in_process(holders + 1)
    sources, received = range(holders), InPlace(newcomer.state, lambda: None)

    def act(rank: int) -> None:
        if rank == holders:
            newcomer.in_step(lambda: heal.receive_state(ends[rank], sources, received))
        else:
            sides[rank].in_step(lambda: heal.send_state(ends[rank], sides[rank].state(), sources, [holders]))

    threads = [threading.Thread(target=act, args=(rank,)) for rank in range(holders + 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * DEADLINE_S)
        assert not thread.is_alive()
    return sides


def test_a_copy_that_takes_over_the_scripts_work_is_in_order() -> None:
    holder, newcomer = copied()
    assert holder.device.violations == [] and newcomer.device.violations == []
    assert torch.equal(newcomer.live, holder.live) and float(holder.live[0]) == 2.0


def test_a_copy_in_stripes_is_in_order() -> None:
    sides = copied(holders=2)
    assert [side.device.violations for side in sides] == [[]] * 3
    assert set(sides[-1].live.tolist()) == {2.0, 4.0}, "of each holder a part"


def test_chunks_lie_in_memory_that_the_device_reads_and_writes_itself() -> None:
    for side in copied():
        assert "host copy" in {region.name for region in side.device._regions}


def test_a_chunk_that_is_sent_before_the_device_has_filled_it_is_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pinned_chunks, "_wait", lambda orders: None)
    holder, _ = copied()
    assert any("the host reads host copy, unordered" in v for v in holder.device.violations)


def test_a_copy_on_a_threads_own_stream_is_reported_on_both_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    host = HostOrder().side_stream()
    monkeypatch.setattr(device_order, "_after", lambda *launched: nullcontext(host))
    for side in copied():
        assert any("unordered after" in violation for violation in side.device.violations)
        assert any("bagua-heal works with device 0" in violation for violation in side.device.violations)
