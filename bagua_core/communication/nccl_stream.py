"""In which order do the communicator's work and the script's run on a GPU?

Owns one stream that does not block and is nobody else's, and the events between it and the script's current one. It
waits for what the script has queued so far, and the script's stream for what it needs of it; the host only when it
asks.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol

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


class _CudaMark:
    def __init__(self, event: torch.cuda.Event, device: torch.device) -> None:
        self._event = event
        self._device = device

    def is_past(self) -> bool:
        return bool(self._event.query())  # type: ignore[no-untyped-call]

    def before_current(self) -> None:
        torch.cuda.current_stream(self._device).wait_event(self._event)


class CudaStream:
    """CuPy makes it, since torch hands out streams of a pool that others may be using."""

    def __init__(self, device: torch.device) -> None:
        import cupy

        self._device = device
        with cupy.cuda.Device(device.index):
            self._owner = cupy.cuda.Stream(non_blocking=True)
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
