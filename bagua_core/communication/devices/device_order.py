"""Orders the work that several threads give to one device: moments in streams, and streams of the runtime.

A GPU runs a stream's work in order and different streams in any order. Work on one stream comes after work on another
only by a moment (a CUDA event) that the second stream waits for, or by the host, which waits for the moment and gives
the later work afterwards. A thread of the runtime therefore has a stream of its own, waits there for the moment of its
launch, and hands back the moment of its end.

`order_of` gives the order of a tensor's device: `CudaOrder` for CUDA (cuda_order.py), `HostOrder` for the CPU, whose
work is done when the call returns. The tests have a third one, which checks every access (tests/streams).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Protocol

import torch

Look = Callable[[], None]
"""Called while the host waits, and once after the wait. Raises to give the wait up."""


class Moment(Protocol):
    """A point in a stream."""

    def is_past(self) -> bool:
        """Tells whether the stream has come to this moment. Never blocks."""

    def before_current(self) -> None:
        """Puts the moment before the work that the calling thread's current stream is given from now on. Never
        blocks."""

    def wait(self, look: Look) -> None:
        """Blocks the host until the moment is past. An abort ends a device's work too, so `look` decides what the end
        means: it is called once more after the moment is past."""


class SideStream(Protocol):
    """A stream of the runtime beside the script's streams."""

    def on_it(self) -> AbstractContextManager[object]:
        """Returns a context in which the calling thread's device is the stream's, and its operations run on this
        stream. Afterwards both are what they were, without a context on a device that the process has not used."""

    def mark(self) -> Moment:
        """Returns the moment after what the stream has been given so far."""

    def uses(self, tensor: torch.Tensor) -> None:
        """Keeps the tensor's memory from other use until the stream is done with what it has been given by then."""


class DeviceOrder(Protocol):
    """The order of one device's work. Equal for equal devices."""

    def now(self) -> Moment:
        """Returns the moment after what the calling thread's current stream has been given so far."""

    def side_stream(self) -> SideStream:
        """Returns a stream to use from one thread."""

    def room_on_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns host memory of the tensor's shape and type that the device copies to and from beside other work."""

    def copy_to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns a copy in such memory. The host may read it once a later moment of the current stream is past."""

    def copy_into_host(self, tensor: torch.Tensor, host: torch.Tensor) -> None:
        """Copies `tensor` into `host`, a part of such memory. The host may read it once a later moment of the current
        stream is past."""

    def copy_from_host(self, host: torch.Tensor, tensor: torch.Tensor) -> None:
        """Fills `tensor` with `host` on the current stream. `host` may be let go at once."""


# -- the CPU


class PastMoment:
    """A moment that is past: nothing is under way."""

    def is_past(self) -> bool:
        return True

    def before_current(self) -> None:
        return None

    def wait(self, look: Look) -> None:
        return None


class _CallersStream:
    """The stream of the CPU, which works in the calling thread."""

    def on_it(self) -> AbstractContextManager[object]:
        return nullcontext()

    def mark(self) -> Moment:
        return PastMoment()

    def uses(self, tensor: torch.Tensor) -> None:
        return None


class HostOrder:
    """The order of the CPU: an operation is done when its call returns."""

    def now(self) -> Moment:
        return PastMoment()

    def side_stream(self) -> SideStream:
        return _CallersStream()

    def room_on_host(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(tensor, device="cpu", requires_grad=False)

    def copy_to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().to("cpu", copy=True)

    def copy_into_host(self, tensor: torch.Tensor, host: torch.Tensor) -> None:
        host.copy_(tensor)

    def copy_from_host(self, host: torch.Tensor, tensor: torch.Tensor) -> None:
        tensor.copy_(host)


HOST = HostOrder()


# -- which device


def order_of(tensors: Iterable[torch.Tensor]) -> DeviceOrder:
    """Returns the order of the first CUDA tensor's device; the CPU's if there is none."""
    for tensor in tensors:
        if tensor.device.type == "cuda":
            return _of_device(tensor.device)
    return HOST


def current_order() -> DeviceOrder:
    """Returns the order of the calling thread's current device; the CPU's in a process that has not used CUDA."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return HOST
    return _of_device(torch.device("cuda", torch.cuda.current_device()))


def _of_device(device: torch.device) -> DeviceOrder:
    from bagua_core.communication.devices.cuda_order import CudaOrder  # late: it imports this module

    return CudaOrder(device)


# -- from one thread to another


class Handover:
    """A transfer of device work that one thread has begun and another goes on with. Create it in the first thread."""

    def __init__(self, tensors: Sequence[torch.Tensor] | None = None) -> None:
        """Notes what the first thread's streams have been given. tensors: what the other thread reads or writes; None:
        anything on the current device."""
        tensors_of: dict[DeviceOrder, list[torch.Tensor]] = {}
        for tensor in tensors or ():
            tensors_of.setdefault(order_of([tensor]), []).append(tensor)
        if tensors is None:
            tensors_of[current_order()] = []
        self._launched = [(order, order.now(), those) for order, those in tensors_of.items()]

    @contextmanager
    def taken_over(self, look: Look = lambda: None) -> Iterator[None]:
        """Runs the other thread's operations within a context: they come after all that the first thread's streams had
        been given, and are done on the device when the context ends without an error. look: see Moment.wait."""
        with ExitStack() as current:
            streams = [current.enter_context(_after(*launched)) for launched in self._launched]
            yield
            for stream in streams:
                stream.mark().wait(look)


_OF_HOST = Handover(())


def handover_of_device() -> Handover:
    """Returns the handover of what the calling thread's current device has been given: Handover(), or without a new
    object where the CPU is that device, whose work is done."""
    return _OF_HOST if current_order() is HOST else Handover()


@contextmanager
def _after(order: DeviceOrder, launched: Moment, tensors: Sequence[torch.Tensor]) -> Iterator[SideStream]:
    """Makes a new stream of the calling thread current, behind `launched`, and yields it."""
    stream = order.side_stream()
    with stream.on_it():
        launched.before_current()
        for tensor in tensors:
            stream.uses(tensor)
        yield stream
