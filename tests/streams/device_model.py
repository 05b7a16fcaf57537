"""A device without hardware: streams and events as vector clocks, and a checker of every access to its memory.

Memory is ordinary memory that has been tagged. Work is done when it is given to a stream, so results are exact; what
the model checks is whether a GPU would have had to do it in that order. Each stream has a clock; work on a stream is
ordered after what its clock holds. A moment is a copy of a clock. A stream that waits for a moment, and the host that
waits for one, take it over; work given to a stream comes after all that the host knows to be done. Two accesses of
overlapping memory, one of them a write, of which neither is ordered after the other, are a violation, and so is work
that a thread gives to a stream of a device that is not the thread's own.

One model stands for one worker's GPU. A thread that a worker's thread starts belongs to the same model.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch.utils._python_dispatch import _disable_current_modes

from bagua_core.communication.devices.device_order import Look, Moment

DEFAULT = "default"  # the stream of a thread that has chosen none
Clock = dict[str, int]


@dataclass(slots=True)
class Access:
    low: int
    high: int
    is_write: bool
    stream: str
    tick: int
    what: str


@dataclass(slots=True)
class Region:
    """A storage that is the device's. host: memory of the host that the device writes to."""

    low: int
    high: int
    name: str
    is_host: bool
    storage: object  # kept, so that no other storage gets the address
    accesses: list[Access] = field(default_factory=list)


class _PerThread(threading.local):
    def __init__(self) -> None:
        self.streams: list[str] = []
        self.device = 0


class DeviceModel:
    """index: of the worker's device; a thread begins with device 0, as with CUDA."""

    def __init__(self, index: int = 1) -> None:
        self.index = index
        self.violations: list[str] = []
        self.host_waits: list[str] = []
        """What the host waited for the device for, by thread."""
        self.kept: list[tuple[str, int]] = []
        """(stream, address) of memory that is kept for a stream."""
        self.writes: set[tuple[str, str]] = set()
        """(name of memory, stream that wrote to it)."""
        self._aborted: set[str] = set()
        self._lock = threading.RLock()
        self._clocks: dict[str, Clock] = {}
        self._host: Clock = {}
        self._regions: list[Region] = []
        self._numbers = 0
        self._thread = _PerThread()

    # -- streams

    def new_stream(self, kind: str) -> ModelStream:
        with self._lock:
            self._numbers += 1
            return ModelStream(self, f"{kind}-{self._numbers}", self._numbers)

    @property
    def current(self) -> str:
        return self._thread.streams[-1] if self._thread.streams else DEFAULT

    @contextmanager
    def on(self, stream: str, sets_device: bool = True) -> Iterator[None]:
        """The calling thread's current stream, and device."""
        before = self._thread.device
        if sets_device:
            self._thread.device = self.index
        self._thread.streams.append(stream)
        try:
            yield
        finally:
            self._thread.streams.pop()
            self._thread.device = before

    def moment(self, stream: str) -> ModelMoment:
        with self._lock:
            self._check_device(f"a moment of {stream}")
            return ModelMoment(self, self.reached(stream))

    def _tick(self, stream: str) -> Clock:
        clock = self._clocks.setdefault(stream, {})
        _join(clock, self._host)
        clock[stream] = clock.get(stream, 0) + 1
        return clock

    def reached(self, stream: str) -> Clock:
        """What `stream` has been given so far."""
        with self._lock:
            return dict(self._tick(stream))

    def order(self, stream: str, after: Clock) -> None:
        with self._lock:
            _join(self._clocks.setdefault(stream, {}), after)

    def host_has_seen(self, clock: Clock) -> bool:
        with self._lock:
            return all(self._host.get(stream, 0) >= tick for stream, tick in clock.items())

    def host_waits_for(self, clock: Clock, what: str) -> None:
        with self._lock:
            self.host_waits.append(f"{threading.current_thread().name}: {what}")
            _join(self._host, clock)

    # -- communicators

    def aborted(self, stream: str) -> None:
        """What NCCL had been given there has ended."""
        with self._lock:
            self._aborted.add(stream)

    def joins(self, what: str) -> None:
        """NCCL makes a communicator, which CUDA may hold up until the kernels of others have ended."""
        with self._lock:
            for stream, clock in self._clocks.items():
                is_under_way = stream.startswith("nccl") and self._host.get(stream, 0) < clock.get(stream, 0)
                if is_under_way and stream not in self._aborted:
                    self._add(f"{what} is made beside work of {stream}")

    # -- memory

    def tag(self, tensor: torch.Tensor, name: str, is_host: bool = False) -> torch.Tensor:
        """From now on the tensor's whole storage is the device's."""
        storage = tensor.untyped_storage()
        low, size_bytes = storage.data_ptr(), storage.nbytes()
        with self._lock:
            if size_bytes and not self._region_at(low, low + 1):
                self._regions.append(Region(low, low + size_bytes, name, is_host, storage))
        return tensor

    def region_of(self, tensor: torch.Tensor) -> Region | None:
        if not tensor.numel() or tensor.device.type != "cpu":
            return None
        low, high = span(tensor)
        with self._lock:
            found = self._region_at(low, high)
        return found[0] if found else None

    def is_device(self, tensor: torch.Tensor) -> bool:
        region = self.region_of(tensor)
        return region is not None and not region.is_host

    def _region_at(self, low: int, high: int) -> list[Region]:
        return [r for r in self._regions if r.low < high and low < r.high]

    def access(self, low: int, high: int, is_write: bool, what: str, stream: str | None = None) -> None:
        """Work that touches an address range, on `stream` or the thread's current one."""
        on = self.current if stream is None else stream
        with self._lock:
            touched = self._region_at(low, high)
            if not touched:
                return
            self._check_device(what)
            clock = self._tick(on)
            access = Access(low, high, is_write, on, clock[on], what)
            for region in touched:
                if is_write:
                    self.writes.add((region.name, on))
                self._check(region, access, clock)

    def _check(self, region: Region, access: Access, clock: Clock) -> None:
        kept: list[Access] = []
        for earlier in region.accesses:
            overlaps = earlier.low < access.high and access.low < earlier.high
            is_ordered = clock.get(earlier.stream, 0) >= earlier.tick
            if overlaps and not is_ordered and (access.is_write or earlier.is_write):
                self._report(region, access, earlier)
            covers = access.low <= earlier.low and earlier.high <= access.high
            if not (covers and (access.is_write or not earlier.is_write) and is_ordered):
                kept.append(earlier)
        region.accesses = [*kept, access]

    def host_reads(self, tensor: torch.Tensor, what: str) -> None:
        """Values of the tensor are read by the host. Of device memory torch waits for the current stream first."""
        region = self.region_of(tensor)
        if region is None:
            return
        low, high = span(tensor)
        with self._lock:
            if not region.is_host:
                self.access(low, high, False, what)
                self.host_waits_for(dict(self._clocks[self.current]), f"{what} of {region.name}")
            for earlier in region.accesses:
                overlaps = earlier.low < high and low < earlier.high
                if overlaps and earlier.is_write and self._host.get(earlier.stream, 0) < earlier.tick:
                    self._report(region, Access(low, high, False, "the host", 0, what), earlier)

    def keep(self, tensor: torch.Tensor, stream: str) -> None:
        with self._lock:
            self.kept.append((stream, tensor.untyped_storage().data_ptr()))

    def _check_device(self, what: str) -> None:
        if self._thread.device != self.index:
            self._add(
                f"{what}: thread {threading.current_thread().name} works with device {self._thread.device}, "
                f"the worker's is {self.index}"
            )

    def _report(self, region: Region, access: Access, earlier: Access) -> None:
        does, did = ("writes" if access.is_write else "reads"), ("wrote" if earlier.is_write else "read")
        self._add(
            f"{access.what} on {access.stream} {does} {region.name}, "
            f"unordered after {earlier.what} on {earlier.stream}, which {did} it"
        )

    def _add(self, violation: str) -> None:
        if violation not in self.violations:
            self.violations.append(violation)


class ModelMoment:
    def __init__(self, model: DeviceModel, clock: Clock) -> None:
        self._model = model
        self._clock = clock

    def is_past(self) -> bool:
        """Only if the host has waited for it: a device may always be slower than the host."""
        return self._model.host_has_seen(self._clock)

    def before_current(self) -> None:
        self._model.order(self._model.current, self._clock)

    def wait(self, look: Look) -> None:
        look()
        self._model.host_waits_for(self._clock, "moment")
        look()


class ModelStream:
    """A SideStream, and a Stream of NCCL's."""

    def __init__(self, model: DeviceModel, name: str, address: int) -> None:
        self.model = model
        self.name = name
        self.address = address

    def on_it(self) -> contextmanager[None]:  # type: ignore[valid-type]
        return self.model.on(self.name)

    def mark(self) -> Moment:
        with self.model.on(self.name):
            return self.model.moment(self.name)

    def now(self) -> Moment:
        return self.model.moment(self.model.current)

    def uses(self, tensor: torch.Tensor) -> None:
        self.model.keep(tensor, self.name)

    def give_back(self) -> None:
        return None


class ModelOrder:
    """A DeviceOrder."""

    def __init__(self, model: DeviceModel) -> None:
        self._model = model

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ModelOrder) and other._model is self._model

    def __hash__(self) -> int:
        return id(self._model)

    def now(self) -> Moment:
        return self._model.moment(self._model.current)

    def side_stream(self) -> ModelStream:
        return self._model.new_stream(f"side:{threading.current_thread().name}")

    def room_on_host(self, tensor: torch.Tensor) -> torch.Tensor:
        with _disable_current_modes():
            room = torch.empty_like(tensor, requires_grad=False)
        return self._model.tag(room, "host copy", is_host=True)

    def copy_to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        host = self.room_on_host(tensor)
        self.copy_into_host(tensor, host)
        return host

    def copy_into_host(self, tensor: torch.Tensor, host: torch.Tensor) -> None:
        self._copy(tensor.detach(), host, "copy to host")

    def copy_from_host(self, host: torch.Tensor, tensor: torch.Tensor) -> None:
        self._copy(host, tensor, "copy from host")

    def _copy(self, source: torch.Tensor, target: torch.Tensor, what: str) -> None:
        with torch.no_grad(), _disable_current_modes():
            target.copy_(source)
        self._model.access(*span(source), False, what)
        self._model.access(*span(target), True, what)


def span(tensor: torch.Tensor) -> tuple[int, int]:
    """Addresses between which the tensor's elements lie."""
    if not tensor.numel():
        return 0, 0
    low = tensor.data_ptr()
    reach = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return low, low + (reach + 1) * tensor.element_size()


def _join(clock: Clock, other: Clock) -> None:
    for stream, tick in other.items():
        if clock.get(stream, 0) < tick:
            clock[stream] = tick


Check = Callable[[DeviceModel], None]
