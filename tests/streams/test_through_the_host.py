"""Tensors of a device that go by way of the host: the transport reads what has been copied, and results are in
order."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from bagua_core.algorithms.bytegrad import ByteGrad
from bagua_core.communication.communicator import Pending
from bagua_core.communication.transports.staged import Staged
from tests.core.communication.in_process import InProcessCommunicator, build_in_process
from tests.core.communication.worlds import run_ranks
from tests.streams.device_model import DeviceModel, ModelMoment, ModelOrder
from tests.streams.modelled_ranks import ModelledRank, train
from tests.streams.watching import active_model, belonging_to, clean, install


@pytest.fixture(autouse=True)
def modelled(monkeypatch: pytest.MonkeyPatch) -> None:
    """The transport is another thread of the host, which reads what it is given at once."""
    install(monkeypatch)
    for name in ("allreduce", "alltoall", "allgather"):
        start = getattr(InProcessCommunicator, name)

        def reading(self: Any, *tensors: Any, start: Any = start) -> Pending:
            model = active_model()
            assert model is not None
            model.host_reads(
                tensors[1] if len(tensors) > 1 and torch.is_tensor(tensors[1]) else tensors[0], "gloo"
            )
            pending: Pending = start(self, *tensors)
            return pending

        monkeypatch.setattr(InProcessCommunicator, name, reading)


def trained() -> list[DeviceModel]:
    devices = [DeviceModel(index=rank + 1) for rank in range(2)]
    members = [
        ModelledRank(device, Staged(communicator), ByteGrad(hierarchical=False))
        for device, communicator in zip(devices, build_in_process(2), strict=True)
    ]
    train(members)
    return devices


def test_the_way_through_the_host_is_in_order() -> None:
    assert clean(trained()) == []


@pytest.mark.parametrize(
    "flaw", ["the transport starts before the copy is there", "no copy is awaited at all"]
)
def test_a_copy_that_is_not_awaited_is_reported(flaw: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if flaw == "no copy is awaited at all":
        monkeypatch.setattr(ModelMoment, "wait", lambda moment, look: None)
    else:
        monkeypatch.setattr(
            "bagua_core.communication.transports.staged._copied",
            lambda t: ModelOrder(active()).copy_to_host(t),
        )
    assert any("gloo on the host reads host copy" in violation for violation in clean(trained()))


def active() -> DeviceModel:
    model = active_model()
    assert model is not None
    return model


def test_a_result_comes_back_on_the_stream_of_the_waiting_thread() -> None:
    devices = [DeviceModel(index=rank + 1) for rank in range(2)]
    world = [Staged(c) for c in build_in_process(2)]

    def act(rank: int) -> list[float]:
        device = devices[rank]
        tensor = device.tag(torch.zeros(4), "tensor")
        with belonging_to(device):
            with device.on("one stream"):
                tensor.add_(rank + 1.0)
                pending = world[rank].allreduce(tensor)
            with device.on("another stream"):
                pending.wait()
                tensor.mul_(2.0)
        return tensor.tolist()

    assert run_ranks([0, 1], act) == [[6.0] * 4] * 2
    assert clean(devices) == []
