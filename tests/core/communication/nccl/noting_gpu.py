"""A GPU's stream, a communicator of CuPy and its clock that note what they are asked."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import torch

from bagua_core.communication.communicator import (
    AbortFlag,
)
from bagua_core.communication.nccl.nccl import NcclCommunicator
from bagua_core.communication.nccl.nccl_library import Nccl
from tests.core.communication.emulated_nccl import (
    Handle,
    Module,
    _World,
)
from tests.core.communication.worlds import DEADLINE_S

STREAM, MESSAGES = 11, 12


class NotingMark:
    def __init__(self, stream: NotingStream) -> None:
        self._stream = stream
        self.past = stream.is_quick

    def is_past(self) -> bool:
        return self.past

    def before_current(self) -> None:
        self._stream.note("current waits for mark")

    def wait(self, look: Callable[[], None]) -> None:
        deadline_s = time.monotonic() + DEADLINE_S
        while not self.past:
            look()
            assert time.monotonic() < deadline_s
            threading.Event().wait(0.001)
        look()


class NotingNow:
    """A moment of the script's stream."""

    def __init__(self, stream: NotingStream) -> None:
        self._stream = stream

    def is_past(self) -> bool:
        return False

    def before_current(self) -> None:
        self._stream.note("stream waits for script")

    def wait(self, look: Callable[[], None]) -> None:
        raise AssertionError("the host does not wait for the script's work")


class NotingStream:
    """Writes down what it is asked. is_quick: a mark is past as soon as it is made."""

    def __init__(self, address: int, notes: list[str], is_quick: bool = True) -> None:
        self.address = address
        self.is_quick = is_quick
        self.notes = notes
        self.used: list[torch.Tensor] = []
        self.marks: list[NotingMark] = []

    def note(self, what: str) -> None:
        self.notes.append(what)

    def now(self) -> NotingNow:
        self.note("moment of script")
        return NotingNow(self)

    def mark(self) -> NotingMark:
        self.note("mark")
        self.marks.append(NotingMark(self))
        return self.marks[-1]

    def on_it(self) -> AbstractContextManager[object]:
        @contextmanager
        def noted() -> Iterator[None]:
            self.note("stream is current")
            try:
                yield
            finally:
                self.note("stream is current no more")

        return noted()

    def uses(self, tensor: torch.Tensor) -> None:
        self.used.append(tensor)

    def give_back(self) -> None:
        self.note("given back")


class One:
    """A world of one rank over noting streams, or one rank of a larger one whose others never come."""

    def __init__(self, is_quick: bool = True, world_size: int = 1) -> None:
        self.notes: list[str] = []
        self.stream = NotingStream(STREAM, self.notes, is_quick)
        self.module = Module()
        self.handles = [Handle(self.module, _World(world_size), 0) for _ in range(2)]
        for handle in self.handles:
            self._note_calls(handle)
        self.communicator = NcclCommunicator(
            Nccl(self.module),
            (self.handles[0], self.stream),
            (self.handles[1], NotingStream(MESSAGES, self.notes)),
            torch.device("cpu"),
            1,
            0,
            world_size,
            AbortFlag(),
        )

    def _note_calls(self, handle: Handle) -> None:
        admit = handle._admit

        def noting(what: str, stream: int) -> None:
            self.notes.append(f"{what} on {stream}")
            admit(what, stream)

        handle._admit = noting  # type: ignore[method-assign]
