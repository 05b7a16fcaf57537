"""CudaOrder's calls of torch, and their order; by a fake of torch.cuda that knows devices and contexts."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from bagua_core.communication.communicator import CollectiveAborted
from bagua_core.communication.devices import device_order
from bagua_core.communication.devices.cuda_order import CudaMoment, CudaOrder
from bagua_core.communication.devices.device_order import HOST, Handover, current_order, order_of

GPU = torch.device("cuda", 1)


class FakeStream:
    def __init__(self, device: torch.device, name: str) -> None:
        self.device = device
        self.name = name
        self.waited_for: list[FakeEvent] = []

    def wait_event(self, event: FakeEvent) -> None:
        self.waited_for.append(event)


class FakeEvent:
    past = True

    def __init__(self) -> None:
        self.of = ""
        self.asked = 0

    def record(self, stream: FakeStream) -> None:
        self.of = stream.name

    def query(self) -> bool:
        self.asked += 1
        return self.past


class _Thread(threading.local):
    def __init__(self) -> None:
        self.device = 0
        self.streams: dict[int, FakeStream] = {}


class FakeCuda:
    """As torch.cuda with CUDA 12: selecting a device makes a context there; `device` does not select one that has none
    when it is left; `stream` restores the device before it by selecting it."""

    Event = FakeEvent

    def __init__(self) -> None:
        self.contexts: set[int] = set()
        self.made: list[FakeStream] = []
        self._thread = _Thread()

    def Stream(self, device: torch.device) -> FakeStream:
        self.contexts.add(self._thread.device)
        self.made.append(FakeStream(device, f"side {len(self.made)}"))
        return self.made[-1]

    def current_stream(self, device: torch.device) -> FakeStream:
        index = device.index
        return self._thread.streams.setdefault(index, FakeStream(device, f"default of {index}"))

    def current_device(self) -> int:
        return self._thread.device

    def is_initialized(self) -> bool:
        return True

    @contextmanager
    def device(self, device: torch.device | int) -> Iterator[None]:
        before, index = self._thread.device, device if isinstance(device, int) else device.index
        self._thread.device = index
        self.contexts.add(index)
        yield
        self._thread.device = before  # in torch's eyes; CUDA is not told of a device without a context

    @contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        before_device, before = self._thread.device, self.current_stream(stream.device)
        self._thread.device = stream.device.index
        self.contexts.add(stream.device.index)
        self._thread.streams[stream.device.index] = stream
        yield
        self._thread.streams[stream.device.index] = before
        self._thread.device = before_device
        self.contexts.add(before_device)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    fake = FakeCuda()
    for name in ("Event", "Stream", "current_stream", "current_device", "is_initialized", "device", "stream"):
        monkeypatch.setattr(torch.cuda, name, getattr(fake, name))
    return fake


def in_a_thread(act: Any) -> None:
    """A new thread's device is 0."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            act()
        except BaseException as error:  # noqa: BLE001 (raised below)
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(10.0)
    assert not thread.is_alive()
    if errors:
        raise errors[0]


def test_a_thread_of_the_runtime_makes_no_context_on_gpu_0(cuda: FakeCuda) -> None:
    def act() -> None:
        order = CudaOrder(GPU)
        stream = order.side_stream()
        with stream.on_it():
            assert cuda.current_device() == 1 and cuda.current_stream(GPU) is cuda.made[0]
            order.now()
        stream.mark()

    in_a_thread(act)
    assert cuda.contexts == {1}


def test_the_fake_tells_a_stream_context_without_the_guard(cuda: FakeCuda) -> None:
    def act() -> None:
        with cuda.device(GPU):
            stream = cuda.Stream(GPU)
        with cuda.stream(stream):
            pass

    cuda._thread.device = 0
    in_a_thread(act)
    assert cuda.contexts == {0, 1}


def test_a_handover_orders_the_threads_stream_after_the_scripts(cuda: FakeCuda) -> None:
    with cuda.device(GPU):
        handover = Handover()

    def act() -> None:
        with handover.taken_over():
            (stream,) = cuda.made
            assert [event.of for event in stream.waited_for] == ["default of 1"]

    in_a_thread(act)
    assert cuda.contexts == {1}


def test_the_order_is_that_of_the_tensors_device(cuda: FakeCuda) -> None:
    from types import SimpleNamespace

    on_gpu: Any = SimpleNamespace(device=GPU)
    assert order_of([torch.ones(1), on_gpu]) == CudaOrder(GPU)
    assert order_of([torch.ones(1)]) is HOST
    with cuda.device(GPU):
        assert current_order() == CudaOrder(GPU)
    assert hash(CudaOrder(GPU)) == hash(CudaOrder(torch.device("cuda", 1)))


def test_a_process_without_cuda_is_not_asked_for_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: pytest.fail("that would make a context"))
    assert current_order() is HOST and device_order.HOST.now().is_past()


def test_a_wait_asks_until_the_moment_is_past_and_looks_once_more(cuda: FakeCuda) -> None:
    moment = CudaMoment(FakeStream(GPU, "a"), GPU)
    event: Any = moment._event
    event.past = False
    looks = 0

    def look() -> None:
        nonlocal looks
        looks += 1
        if looks == 3:
            event.past = True

    moment.wait(look)
    assert looks == 4 and event.asked == 4


def test_a_wait_ends_when_its_look_raises(cuda: FakeCuda) -> None:
    moment = CudaMoment(FakeStream(GPU, "a"), GPU)
    event: Any = moment._event
    event.past = False

    def look() -> None:
        raise CollectiveAborted("lost")

    with pytest.raises(CollectiveAborted):
        moment.wait(look)
    event.past = True  # by the abort: no result
    with pytest.raises(CollectiveAborted):
        moment.wait(look)


def test_a_short_wait_is_asked_often(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(time, "sleep", pauses.append)
    moment = CudaMoment(FakeStream(GPU, "a"), GPU)
    event: Any = moment._event
    event.past = False

    def look() -> None:
        event.past = len(pauses) >= 50

    moment.wait(look)
    assert max(pauses) <= 100e-6 and len(pauses) == 51
