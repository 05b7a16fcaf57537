"""Implements the order of a CUDA device's work by torch's streams and events.

Every change of a thread's device goes through `torch.cuda.device`: on leaving it does not select a device on which the
process has no context. `torch.cuda.stream` alone, `torch.cuda.set_device` and CuPy's `Device` do, and from CUDA 12 on
selecting a device makes a context there: some hundred MiB on GPU 0 from every worker.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from bagua_core.communication.devices.device_order import Look, Moment, SideStream

# The host asks whether the device has come to a moment. Right after the work was given that is soon the case; of what
# takes long, a step waits once, and a late answer by the longest pause is not seen in its time.
SHORTEST_PAUSE_S = 20e-6
LONGEST_PAUSE_S = 100e-6
RARE_AFTER_S = 1.0  # a peer is late: the processor has better things to do
RARE_PAUSE_S = 1e-3


class CudaMoment:
    """An event in a stream of `device`."""

    def __init__(self, stream: Any, device: torch.device) -> None:
        self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        with torch.cuda.device(device):
            self._event.record(stream)
        self._device = device

    def is_past(self) -> bool:
        return bool(self._event.query())  # type: ignore[no-untyped-call]

    def before_current(self) -> None:
        torch.cuda.current_stream(self._device).wait_event(self._event)

    def before(self, stream: Any) -> None:
        """Puts the moment before the work that `stream` is given from now on."""
        stream.wait_event(self._event)

    def wait(self, look: Look) -> None:
        began_s = time.monotonic()
        pause_s = SHORTEST_PAUSE_S
        while not self.is_past():
            look()
            time.sleep(pause_s)
            longest_s = LONGEST_PAUSE_S if time.monotonic() - began_s < RARE_AFTER_S else RARE_PAUSE_S
            pause_s = min(2 * pause_s, longest_s)
        look()


@contextmanager
def current(stream: Any, device: torch.device) -> Iterator[None]:
    """Makes `device` the thread's device, and `stream` its current stream there, within the context."""
    with torch.cuda.device(device), torch.cuda.stream(stream):
        yield


class CudaSideStream:
    def __init__(self, stream: Any, device: torch.device) -> None:
        self._stream = stream
        self._device = device

    def on_it(self) -> AbstractContextManager[object]:
        return current(self._stream, self._device)

    def mark(self) -> Moment:
        return CudaMoment(self._stream, self._device)

    def uses(self, tensor: torch.Tensor) -> None:
        tensor.record_stream(self._stream)


@dataclass(frozen=True, slots=True)
class CudaOrder:
    """The order of one CUDA device. device: with its index."""

    device: torch.device

    def now(self) -> Moment:
        return CudaMoment(torch.cuda.current_stream(self.device), self.device)

    def side_stream(self) -> SideStream:
        with torch.cuda.device(self.device):
            return CudaSideStream(torch.cuda.Stream(self.device), self.device)  # type: ignore[no-untyped-call]

    def room_on_host(self, tensor: torch.Tensor) -> torch.Tensor:
        # torch keeps pinned memory for the next one of that size, and knows which copies still read it
        return torch.empty_like(tensor, device="cpu", requires_grad=False, pin_memory=True)

    def copy_to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        host = self.room_on_host(tensor)
        self.copy_into_host(tensor, host)
        return host

    def copy_into_host(self, tensor: torch.Tensor, host: torch.Tensor) -> None:
        with torch.no_grad():
            host.copy_(tensor.detach(), non_blocking=True)

    def copy_from_host(self, host: torch.Tensor, tensor: torch.Tensor) -> None:
        with torch.no_grad():
            tensor.copy_(host, non_blocking=True)
