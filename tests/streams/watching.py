"""Reports every access of the runtime's real code to a DeviceModel: torch's operations, the kernels, NCCL's calls."""

from __future__ import annotations

import inspect
import itertools
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from bagua_core.communication.communicator import AbortFlag, Communicator
from bagua_core.communication.devices import device_order
from bagua_core.communication.devices.device_order import DeviceOrder
from bagua_core.communication.nccl.nccl import NcclCommunicator
from bagua_core.communication.nccl.nccl_library import Nccl
from bagua_core.communication.transports import by_device
from bagua_core.kernels import targets
from tests.core.communication.emulated_nccl import Handle, Module, _Call, _World
from tests.streams.device_model import DeviceModel, ModelOrder, span

# They look at a tensor's shape alone.
_SHAPE_ONLY = (
    "empty_like",
    "zeros_like",
    "ones_like",
    "full_like",
    "new_empty",
    "new_zeros",
    "new_ones",
    "new_full",
)
# The shape of their result follows from values, or their result is the host's: torch waits for the device.
_VALUES_DECIDE = ("nonzero", "masked_select", "equal", "unique_dim", "_unique2", "unique_consecutive")
_RUNTIME = "bagua-"  # threads of the runtime: what they allocate is the device's


class _Active(threading.local):
    model: DeviceModel | None = None


_active = _Active()


def active_model() -> DeviceModel | None:
    return _active.model


@contextmanager
def belonging_to(model: DeviceModel) -> Iterator[None]:
    """The calling thread is of the model's worker."""
    before, _active.model = _active.model, model
    try:
        with _Operations(model), _HostReads(model):
            yield
    finally:
        _active.model = before


class _Operations(TorchDispatchMode):
    def __init__(self, model: DeviceModel) -> None:
        super().__init__()
        self._model = model

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it works on its local tensors, of which this mode hears then
        kwargs = kwargs or {}
        if any(issubclass(kind, FakeTensor) for kind in types):
            return func(*args, **kwargs)  # it has no memory: DTensor asks for a shape
        model, name = self._model, func._schema.name.removeprefix("aten::")
        if name == "_local_scalar_dense":
            model.host_reads(args[0], "item")
            return func(*args, **kwargs)
        read, written = _tensors_of(func, args, kwargs)
        if name in _VALUES_DECIDE or _picks_by_mask(name, args):
            for tensor in [t for t in read if model.is_device(t)][-1:]:
                model.host_reads(tensor, name)
        result = func(*args, **kwargs)
        if func.is_view:
            return result
        is_of_device = any(model.is_device(t) for t in (*read, *written))
        for tensor in written if is_of_device else ():
            model.tag(tensor, f"target of {name}")  # to the host values go by a DeviceOrder alone
        if not is_of_device and any(model.region_of(t) for t in (*read, *written)):
            for tensor in read:  # copies on the host, where the calling thread works
                model.host_reads(tensor, name)
            return result
        if name.removesuffix("_out") not in _SHAPE_ONLY:
            for tensor in read:
                model.access(*span(tensor), False, name)
        for tensor in written:
            model.access(*span(tensor), True, name)
        if is_of_device or threading.current_thread().name.startswith(_RUNTIME):
            known = {t.untyped_storage().data_ptr() for t in (*read, *written)}
            for tensor in _flat(result):
                if tensor.untyped_storage().data_ptr() not in known and tensor.device.type == "cpu":
                    model.tag(tensor, f"result of {name}")
                    model.access(*span(tensor), True, name)
        return result


def _picks_by_mask(name: str, args: Any) -> bool:
    return name.startswith("index") and any(t.dtype is torch.bool for t in _flat(args[1]))


def _tensors_of(func: Any, args: Any, kwargs: Any) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    read: list[torch.Tensor] = []
    written: list[torch.Tensor] = []
    for place, argument in enumerate(func._schema.arguments):
        value = args[place] if place < len(args) else kwargs.get(argument.name)
        is_written = argument.alias_info is not None and argument.alias_info.is_write
        (written if is_written else read).extend(_flat(value))
    return read, written


def _flat(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [t for item in value for t in _flat(item)]
    return []


class _HostReads(TorchFunctionMode):
    """Methods that read values without an operation, on the CPU."""

    def __init__(self, model: DeviceModel) -> None:
        super().__init__()
        self._model = model

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.Tensor.tolist, torch.Tensor.numpy):
            self._model.host_reads(args[0], func.__name__)
        return func(*args, **(kwargs or {}))


class _WatchedKernels:
    """The kernels for the CPU; their pointers are no operation of torch's."""

    WRITTEN = frozenset({"out", "left", "x", "after", "parameter", "first"})

    def __init__(self, kernels: Any) -> None:
        self._kernels = kernels

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._kernels, name)
        parameters = list(inspect.signature(method).parameters)

        def watched(*args: Any, **kwargs: Any) -> None:
            method(*args, **kwargs)
            model = active_model()
            if model is None:
                return
            for parameter, value in itertools.chain(zip(parameters, args, strict=False), kwargs.items()):
                for tensor in _flat(value):
                    is_written = parameter in self.WRITTEN or (
                        name.startswith("adam") and parameter == "values"
                    )
                    if not is_written or name != "decompress":
                        model.access(*span(tensor), False, name)
                    if is_written:
                        model.access(*span(tensor), True, name)

        return watched


class WatchedHandle(Handle):
    """NCCL's kernels read and write on the stream that they are given to."""

    def __init__(
        self, module: Module, world: _World, rank: int, model: DeviceModel, streams: dict[int, str]
    ) -> None:
        super().__init__(module, world, rank)
        self._model = model
        self._streams = streams

    def _collective(self, call: _Call, stream: int) -> None:
        size_bytes = call.count * call.dtype.itemsize
        kind, size = call.what[0], self._world.size
        read = size_bytes * (size if kind == "reduceScatter" else 1)
        written = size_bytes * (size if kind == "allGather" else 1)
        self._model.access(call.send, call.send + read, False, kind, self._streams[stream])
        self._model.access(call.receive, call.receive + written, True, kind, self._streams[stream])
        super()._collective(call, stream)

    def send(self, sendbuf: int, count: int, datatype: int, peer: int, stream: int) -> None:
        super().send(sendbuf, count, datatype, peer, stream)
        self._model.access(sendbuf, sendbuf + count, False, "send", self._streams[stream])

    def recv(self, recvbuf: int, count: int, datatype: int, peer: int, stream: int) -> None:
        super().recv(recvbuf, count, datatype, peer, stream)
        self._model.access(recvbuf, recvbuf + count, True, "recv", self._streams[stream])

    def abort(self) -> None:
        super().abort()
        for name in self._streams.values():
            self._model.aborted(name)


def nccl_world(
    models: Sequence[DeviceModel], flags: Sequence[AbortFlag] | None = None
) -> list[NcclCommunicator]:
    """The real NcclCommunicator over emulated calls, one rank a model. Messages are of bytes."""
    module = Module()
    worlds = [_World(len(models)), _World(len(models))]

    def line(rank: int, which: int) -> Any:
        stream = models[rank].new_stream(("nccl", "nccl-messages")[which])
        handle = WatchedHandle(module, worlds[which], rank, models[rank], {stream.address: stream.name})
        return handle, stream

    return [
        NcclCommunicator(
            Nccl(module),
            line(rank, 0),
            line(rank, 1),
            torch.device("cpu"),
            1,
            rank,
            len(models),
            AbortFlag() if flags is None else flags[rank],
        )
        for rank in range(len(models))
    ]


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on the runtime's code finds the calling thread's model where it looks for a device."""

    def order_of(tensors: Any) -> DeviceOrder:
        model = active_model()
        if model is not None and any(model.is_device(t) for t in tensors):
            return ModelOrder(model)
        return device_order.HOST

    def current_order() -> DeviceOrder:
        model = active_model()
        return device_order.HOST if model is None else ModelOrder(model)

    def is_of_gpu(tensor: torch.Tensor) -> bool:
        model = active_model()
        return model is not None and model.is_device(tensor)

    monkeypatch.setattr(by_device, "is_of_gpu", is_of_gpu)
    monkeypatch.setattr(device_order, "order_of", order_of)
    monkeypatch.setattr(device_order, "current_order", current_order)
    chosen = targets._cpu
    monkeypatch.setattr(
        targets, "_cpu", lambda choice: (chosen(choice)[0], _WatchedKernels(chosen(choice)[1]))
    )
    start, run = threading.Thread.start, threading.Thread.run

    def starting(thread: threading.Thread) -> None:
        thread._model = active_model()  # type: ignore[attr-defined]
        start(thread)

    def running(thread: threading.Thread) -> None:
        model = getattr(thread, "_model", None)
        if model is None:
            run(thread)
            return
        with belonging_to(model):
            run(thread)

    monkeypatch.setattr(threading.Thread, "start", starting)
    monkeypatch.setattr(threading.Thread, "run", running)


def clean(models: Sequence[DeviceModel]) -> list[str]:
    """What the checker found, of all workers."""
    return [violation for model in models for violation in model.violations]


__all__ = ["Communicator", "active_model", "belonging_to", "clean", "install", "nccl_world"]
