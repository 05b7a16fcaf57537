"""Runs operations in threads of their own and delivers the end of each as exactly one event.

Contract, for `Background.run`, `background_thread` and `perform`:

- `on_end` is called exactly once for every operation: with `Succeeded` and the value it returned, or with `Failed` and
  whatever it raised, expected or not. An operation that `Background.stop` discards ends in `Failed` with
  OperationDiscarded.
- `on_end` runs in the thread of the operation. It only passes the event on (into an inbox, a timer); if it raises, that
  is logged as a bug, and the thread goes on.
- An error outside the tree of `bagua_agent.base.errors`, or an InternalError, is a bug until shown otherwise: it is
  logged with its traceback, and delivered like any other. The owner decides what follows: try again, give something up,
  or end the process with one clear error.
- An operation that raises ends neither its thread nor the operations behind it.

Invariant: nothing here retries; a retry is a decision of the owner.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from bagua_agent.base.errors import BaguaError, InternalError, OperationDiscarded

log = logging.getLogger(__name__)

T = TypeVar("T")

STOP_TIMEOUT_S = 10.0  # longer than one bounded request to etcd


@dataclass(frozen=True, slots=True)
class Succeeded(Generic[T]):
    """The operation returned `value`."""

    value: T


@dataclass(frozen=True, slots=True)
class Failed:
    """The operation raised `error`."""

    error: BaseException

    @property
    def is_bug(self) -> bool:
        return is_bug(self.error)

    @property
    def reason(self) -> str:
        return describe(self.error)


OperationEnd = Succeeded[T] | Failed


def is_bug(error: BaseException) -> bool:
    """Tells whether `error` is unexpected: not one of the errors with which our own code reports trouble."""
    return isinstance(error, InternalError) or not isinstance(error, BaguaError)


def describe(error: BaseException) -> str:
    """Describes `error` in a line: errors of our own tree speak for themselves, others need their type."""
    if isinstance(error, BaguaError):
        return str(error)
    text = str(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def perform(what: str, operation: Callable[[], T], on_end: Callable[[OperationEnd[T]], object]) -> None:
    """Runs `operation` here and delivers its end; see the module's contract. Raises nothing.

    what: the operation in a few words, for the log.
    """
    end: OperationEnd[T]
    try:
        end = Succeeded(operation())
    except BaseException as error:
        # SystemExit and MemoryError too must not end an operation without an event
        end = Failed(error)
        if end.is_bug:
            log.error("bug: %s raised %s", what, end.reason, exc_info=error)
    _deliver(what, end, on_end)


def background_thread(
    name: str,
    operation: Callable[[], T],
    on_end: Callable[[OperationEnd[T]], object],
) -> threading.Thread:
    """Makes a daemon thread, not started yet, with one operation. For threads that wait in a loop until they are
    stopped.

    `start` raises RuntimeError if the host allows no thread; the operation was not accepted then.
    """
    return threading.Thread(target=perform, args=(name, operation, on_end), name=name, daemon=True)


@dataclass(frozen=True, slots=True)
class _Task:
    what: str
    operation: Callable[[], Any]
    on_end: Callable[[OperationEnd[Any]], object]


class Background:
    """A named executor with at most `threads` threads, started as they are needed, which live until `stop`.

    With one thread operations run in the order of `run`. Thread-safe.
    """

    def __init__(self, name: str, threads: int = 1) -> None:
        self._name = name
        self._most_threads = threads
        self._changed = threading.Condition()
        self._waiting: deque[_Task] = deque()
        self._threads: list[threading.Thread] = []
        self._idle = 0
        self._stopping = False

    def run(self, what: str, operation: Callable[[], T], on_end: Callable[[OperationEnd[T]], object]) -> None:
        """Queues an operation and returns at once; see the module's contract. If no thread can be started the end comes
        from this call."""
        task = _Task(what, operation, on_end)
        with self._changed:
            error = self._accept(task)
        if error is not None:
            _deliver(what, Failed(error), on_end)

    def _accept(self, task: _Task) -> BaseException | None:
        """Queues the task. Returns why it will never run; None if it will. The lock is held."""
        if self._stopping:
            return OperationDiscarded(f"{task.what}: {self._name} was stopped before")
        self._waiting.append(task)
        if len(self._waiting) > self._idle and len(self._threads) < self._most_threads:
            number = len(self._threads)
            thread = threading.Thread(target=self._work, name=f"{self._name}-{number}", daemon=True)
            try:
                thread.start()
            except (RuntimeError, MemoryError) as error:  # no thread to be had: a limit of the host
                log.error("%s: no thread can be started for %s: %s", self._name, task.what, error)
                if not self._threads:
                    self._waiting.pop()
                    return error
            else:
                self._threads.append(thread)
        self._changed.notify()
        return None

    def flush(self, timeout_s: float) -> bool:
        """Waits, and tells whether every operation so far ended within timeout_s. For an executor of one thread."""
        ended = threading.Event()
        self.run("flush", lambda: None, lambda _: ended.set())
        return ended.wait(timeout_s)

    def stop(self, timeout_s: float = STOP_TIMEOUT_S) -> bool:
        """Discards what has not begun, and waits at most timeout_s for what has. Returns False if something still runs
        then. May be called twice. Not from an operation."""
        with self._changed:
            self._stopping = True
            discarded = list(self._waiting)
            self._waiting.clear()
            self._changed.notify_all()
        for task in discarded:
            error = OperationDiscarded(f"{task.what}: {self._name} was stopped")
            _deliver(task.what, Failed(error), task.on_end)
        deadline_s = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, deadline_s - time.monotonic()))
        left = [thread.name for thread in self._threads if thread.is_alive()]
        if left:
            log.error("%s did not end within %g s; still running: %s", self._name, timeout_s, ", ".join(left))
        return not left

    def _work(self) -> None:
        while True:
            with self._changed:
                self._idle += 1
                self._changed.wait_for(lambda: self._waiting or self._stopping)
                self._idle -= 1
                if not self._waiting:
                    return
                task = self._waiting.popleft()
            perform(task.what, task.operation, task.on_end)
            del task  # an idle thread keeps nothing of the last operation alive


def _deliver(what: str, end: OperationEnd[T], on_end: Callable[[OperationEnd[T]], object]) -> None:
    try:
        on_end(end)
    except Exception:
        log.exception("bug: the owner of %s did not take its end (%s)", what, end)
