"""Waits for an operation: until it completes or the abort flag is set, whichever comes first.

Owns the one waiting loop of all communicators. Knows no transport: each says when its operation is done.
A wait sleeps on one queue that completion and abort both wake; inside a transport it blocks only briefly.
"""

from __future__ import annotations

import threading
import time
from abc import abstractmethod
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any

from bagua_core import tracing
from bagua_core.communication.communicator import AbortFlag, CollectiveAborted, CollectiveFailed, Pending


class WakeablePending(Pending):
    """A Pending whose transport can call back on completion, from any thread."""

    def __init__(self, abort_flag: AbortFlag) -> None:
        self._abort_flag = abort_flag

    @abstractmethod
    def _call_when_done(self, wake: Callable[[object], None]) -> None:
        """Calls `wake` with any argument once the operation is done; at once if it is done already."""

    @abstractmethod
    def _collect(self) -> None:
        """Finishes an operation that is done, or raises CollectiveFailed. Called once or more."""

    def _wait_briefly(self) -> bool:
        """Blocks in the transport for a few milliseconds at most, if it can; returns whether the operation is done."""
        return False

    def _abandoned(self) -> None:
        """Handles a wait that was given up while the operation still ran; does nothing by default."""
        return None

    def wait(self, stalled: Callable[[float], None] | None = None, stall_after_s: float = 0.5) -> None:
        if not self.is_done() and not self._wait_briefly():
            self._sleep(stalled, stall_after_s)
        self._collect()

    def _sleep(self, stalled: Callable[[float], None] | None, stall_after_s: float) -> None:
        # a SimpleQueue, because its put is one C call: the transport's thread holds the GIL only for that
        wakes: SimpleQueue[Any] = SimpleQueue()
        aborted = _AbortWake(wakes)
        began_s = time.monotonic()
        self._abort_flag.add_waiter(aborted)
        try:
            self._call_when_done(wakes.put)
            while True:
                try:
                    woken_by = wakes.get(timeout=stall_after_s)
                except Empty:
                    if stalled is not None:
                        stalled(time.monotonic() - began_s)
                    continue
                if woken_by is aborted:
                    self._abandoned()
                    raise CollectiveAborted(self._abort_flag.reason or "aborted")
                return
        finally:
            self._abort_flag.remove_waiter(aborted)


class _AbortWake:
    """A callable that puts itself on the queue, so that the wait can tell an abort from completion."""

    def __init__(self, wakes: SimpleQueue[Any]) -> None:
        self._wakes = wakes

    def __call__(self) -> None:
        self._wakes.put(self)


def trace_operation(pending: Pending, name: str, value: int) -> None:
    """Records the span from now to the operation's end. It records nothing for an operation that is not a
    WakeablePending, such as one of NCCL, which runs on a device and does not call back."""
    recorder = tracing.active
    if recorder is None or not isinstance(pending, WakeablePending):
        return
    begin_ns = time.monotonic_ns()

    def ended(_: object) -> None:
        recorder.span(name, begin_ns, value=value, track=tracing.COLLECTIVES)

    pending._call_when_done(ended)


class Completion:
    """The end of an operation that another thread carries out, with an error or without. Only the first end counts."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._wakes: list[Callable[[object], None]] = []
        self.is_over = False
        self.error: Exception | None = None

    def end(self, error: Exception | None) -> None:
        with self._lock:
            if self.is_over:
                return
            self.is_over, self.error = True, error
            wakes, self._wakes = self._wakes, []
        for wake in wakes:
            wake(None)

    def call_when_over(self, wake: Callable[[object], None]) -> None:
        """Calls `wake` with None once the operation is over; at once if it is over already."""
        with self._lock:
            if not self.is_over:
                self._wakes.append(wake)
                return
        wake(None)


class DonePending(Pending):
    """An operation that had nothing to do, for example on an empty tensor."""

    def wait(self, stalled: Callable[[float], None] | None = None, stall_after_s: float = 0.5) -> None:
        return None

    def is_done(self) -> bool:
        return True


class FailedPending(Pending):
    """An operation that could not start. Only `wait` raises its error, so that callers have one place to check."""

    def __init__(self, error: CollectiveFailed) -> None:
        self._error = error

    def wait(self, stalled: Callable[[float], None] | None = None, stall_after_s: float = 0.5) -> None:
        raise self._error

    def is_done(self) -> bool:
        return True
