"""In which order do the communicator's work and the script's run on a GPU?

Owns one stream that does not block and is nobody else's, and the events between it and the script's current one. It
waits for what the script has queued so far, and the script's stream for what it needs of it; the host only when it
asks. Invariant: no stream is ever destroyed, for torch notes on memory which streams used it and asks them when that is
given away, which may be long after a generation.
"""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch


class Mark(Protocol):
    """A moment in a stream."""

    def is_past(self) -> bool:
        """Whether the stream has come to it. Never blocks."""

    def before_current(self) -> None:
        """What the current stream is given from now on comes after it."""


class Stream(Protocol):
    """What NcclCommunicator needs of one; the fake of the tests writes down the order."""

    @property
    def address(self) -> int: ...

    def after_current(self) -> None:
        """What is given to it from now on comes after all that the current stream has so far."""

    def mark(self) -> Mark: ...

    def on_it(self) -> AbstractContextManager[object]:
        """torch's operations within run on this stream."""

    def uses(self, tensor: torch.Tensor) -> None:
        """Keep the tensor's memory from being given away before the stream is done with it."""

    def give_back(self) -> None:
        """Nothing more is given to it, and what was ends by itself: another may have it."""


class _CudaMark:
    def __init__(self, event: torch.cuda.Event, device: torch.device) -> None:
        self._event = event
        self._device = device

    def is_past(self) -> bool:
        return bool(self._event.query())  # type: ignore[no-untyped-call]

    def before_current(self) -> None:
        torch.cuda.current_stream(self._device).wait_event(self._event)


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
            with cupy.cuda.Device(device.index):
                owner = cupy.cuda.Stream(non_blocking=True)
        _in_use.add(owner)
    return owner


class CudaStream:
    """CuPy makes it, since torch hands out streams of a pool that others may be using."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._owner = _take(device)
        self._stream = torch.cuda.ExternalStream(self._owner.ptr, device=device)  # type: ignore[no-untyped-call]

    @property
    def address(self) -> int:
        return int(self._owner.ptr)

    def after_current(self) -> None:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))

    def mark(self) -> Mark:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self._stream)
        return _CudaMark(event, self._device)

    def on_it(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self._stream)

    def uses(self, tensor: torch.Tensor) -> None:
        tensor.record_stream(self._stream)

    def give_back(self) -> None:
        with _taking:
            if self._owner in _in_use:
                _in_use.discard(self._owner)
                _idle[self._device.index].append(self._owner)
