"""torch's sharding on modelled devices: the streams and events that it takes of a device are those of a DeviceModel."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard import (
    _fsdp_collectives,
    _fsdp_param,
    _fsdp_param_group,
    _fsdp_state,
)

from tests.core.algorithms.gradient_ranks import net
from tests.streams.device_model import Clock, DeviceModel
from tests.streams.watching import active_model


class ShardingEvent:
    def __init__(self) -> None:
        self.clock: Clock = {}

    def record(self, stream: ShardingStream | None = None) -> None:
        model = _model()
        self.clock = model.reached(model.current if stream is None else stream.name)


class ShardingStream:
    """A torch.Stream of the calling thread's model. name: None makes a new stream."""

    def __init__(self, name: str | None = None) -> None:
        self.name = _model().new_stream("sharding").name if name is None else name

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ShardingStream) and other.name == self.name

    def __hash__(self) -> int:
        return hash(self.name)

    def wait_stream(self, other: ShardingStream) -> None:
        _model().order(self.name, _model().reached(other.name))

    def wait_event(self, event: ShardingEvent) -> None:
        _model().order(self.name, event.clock)

    def record_event(self) -> ShardingEvent:
        event = ShardingEvent()
        event.record(self)
        return event


class ShardingDevice:
    """The part of torch.cuda that torch's sharding uses, of the model of the thread that calls it."""

    Event = ShardingEvent

    @staticmethod
    def Stream(priority: int = 0) -> ShardingStream:
        return ShardingStream()

    @staticmethod
    def current_stream() -> ShardingStream:
        return ShardingStream(_model().current)

    @staticmethod
    def stream(stream: ShardingStream) -> AbstractContextManager[None]:
        return _model().on(stream.name)


def _model() -> DeviceModel:
    model = active_model()
    assert model is not None, "the thread belongs to no worker"
    return model


def use_modelled_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on torch's sharding works on models, and keeps gathered parameters: freed memory would be given to other
    tensors, for which the checker has no allocator."""
    for module in (_fsdp_collectives, _fsdp_param_group, _fsdp_state):
        monkeypatch.setattr(module, "_get_device_handle", lambda *_: ShardingDevice())
    for name in ("alloc_storage", "free_storage"):
        monkeypatch.setattr(_fsdp_param, name, lambda _: None)
    monkeypatch.setattr(_fsdp_param_group, "alloc_storage", lambda _: None, raising=False)


@contextmanager
def mesh_of_one() -> Iterator[DeviceMesh]:
    """A mesh of one shard: all that a single process can have."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        yield init_device_mesh("cpu", (1,))
    finally:
        torch.distributed.destroy_process_group()


def sharded_net(mesh: DeviceMesh) -> Any:
    """The usual net, of which two layers and the rest are units of their own."""
    built: Any = net()
    for layer in (built[0], built[2]):
        fully_shard(layer, mesh=mesh)
    return fully_shard(built, mesh=mesh)
