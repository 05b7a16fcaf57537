"""Provides the stream on which a NCCL communicator's work runs.

It does not block and serves no other purpose. An operation waits on it for the moment of its start, and the stream of
the thread that needs the result waits for the operation's mark (device_order.py). Invariant: no stream is ever
destroyed, for torch notes on memory which streams used it and asks them when that is given away, which may be long
after a generation.
"""

from __future__ import annotations

import threading
from typing import Any, Protocol

import torch

from bagua_core.communication.devices.cuda_order import CudaOrder, CudaSideStream
from bagua_core.communication.devices.device_order import Moment, SideStream


class Stream(SideStream, Protocol):
    """The part of a stream that NcclCommunicator needs; the fake of the tests writes down the order."""

    @property
    def address(self) -> int: ...

    def now(self) -> Moment:
        """Returns the moment after what the calling thread's current stream has been given so far."""

    def give_back(self) -> None:
        """Releases the stream for others. Nothing more is given to it, and what was given ends by itself."""


_idle: dict[int, list[Any]] = {}  # by the device's index: streams that were given back
_in_use: set[Any] = set()  # all others, so that none is destroyed
_taking = threading.Lock()


def _take(device: torch.device) -> Any:
    import cupy

    with _taking:
        idle = _idle.setdefault(device.index, [])
        if idle:
            owner = idle.pop()
        else:
            with torch.cuda.device(device):
                owner = cupy.cuda.Stream(non_blocking=True)
        _in_use.add(owner)
    return owner


class CudaStream(CudaSideStream):
    """A stream made by CuPy, since torch hands out streams of a pool that others may be using."""

    def __init__(self, device: torch.device) -> None:
        self._owner = _take(device)
        with torch.cuda.device(device):
            stream = torch.cuda.ExternalStream(self._owner.ptr, device=device)  # type: ignore[no-untyped-call]
        super().__init__(stream, device)

    @property
    def address(self) -> int:
        return int(self._owner.ptr)

    def now(self) -> Moment:
        return CudaOrder(self._device).now()

    def give_back(self) -> None:
        with _taking:
            if self._owner in _in_use:
                _in_use.discard(self._owner)
                _idle[self._device.index].append(self._owner)
