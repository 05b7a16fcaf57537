"""In which order do operations of several collectives run, beside the script's thread?

Owns one thread, and with it the order in which collectives are started, which must be the same on all ranks: a
transport matches them by it. So the order follows from the launches and the flushes alone, never from the time that
anything takes. Knows neither buckets nor steps.

A job is a generator: it yields what it waits for and goes on when that is done. Between two flushes each launch moves
every earlier job on by one wait, after the new one has begun: the network works on one job while the processor works
on another. A flush ends the batch: all its jobs run to their ends before a later one begins.
"""

from __future__ import annotations

import copy
import os
import threading
import weakref
from collections.abc import Callable, Generator
from enum import Enum
from queue import SimpleQueue

import torch

from bagua_core.communication.communicator import CollectiveFailed, Communicator, Pending
from bagua_core.communication.pending import WakeablePending

Job = Generator[Pending, None, None]


class _Signal(Enum):
    """What stands on the line beside jobs."""

    FLUSH = "flush"
    STOP = "stop"


class Conveyor:
    """One per engine, see conveyor_of. Its thread begins with the first launch, and ends with this object or the
    process; a forked child gets one of its own."""

    def __init__(self) -> None:
        self._pid = 0
        self._line: SimpleQueue[_Ticket | _Signal] = SimpleQueue()
        self._is_open = False

    def launch(self, communicator: Communicator, job: Job) -> Pending:
        """Run `job`, whose collectives are of `communicator` or its lanes. Never blocks.

        Once a job of a communicator has failed no other of it is begun or goes on, for peers would take one collective
        for another. Waiting for the result flushes. Call it from one thread at a time, in the same order on all ranks.
        """
        if self._pid != os.getpid():
            self._begin()
        ticket = _Ticket(communicator, job, self.flush)
        self._is_open = True
        self._line.put(ticket)
        return ticket

    def flush(self) -> None:
        """Nothing more comes that the jobs so far should wait for."""
        if self._is_open and self._pid == os.getpid():
            self._is_open = False
            self._line.put(_Signal.FLUSH)

    def _begin(self) -> None:
        self._pid = os.getpid()
        self._line = SimpleQueue()
        threading.Thread(target=_run, args=(self._line,), name="bagua-conveyor", daemon=True).start()
        weakref.finalize(self, self._line.put, _Signal.STOP).atexit = False


_conveyors: weakref.WeakKeyDictionary[object, Conveyor] = weakref.WeakKeyDictionary()


def conveyor_of(engine: object) -> Conveyor:
    """The one that all models of an engine share, so that their collectives have one order."""
    return _conveyors.setdefault(engine, Conveyor())


class _Ticket(WakeablePending):
    """A job, and the wait for its end."""

    def __init__(self, communicator: Communicator, job: Job, flush: Callable[[], None]) -> None:
        super().__init__(communicator.abort_flag)
        self.communicator: Communicator | None = communicator
        self._job: Job | None = job
        self._flush = flush
        self._awaited: Pending | None = None
        self._lock = threading.Lock()
        self._done = False
        self._error: Exception | None = None
        self._wakes: list[Callable[[object], None]] = []

    # -- in the conveyor's thread

    def advance(self) -> None:
        """To the job's next wait, or its end. Raises whatever the job raises."""
        assert self._job is not None
        if self._awaited is not None:
            self._awaited.wait()
        try:
            self._awaited = next(self._job)
        except StopIteration:
            self.end(None)

    def end(self, error: Exception | None) -> None:
        job, self._job = self._job, None
        if job is not None:
            job.close()
        # A bucket keeps its last ticket, which must not keep a communicator from being let go.
        self.communicator = self._awaited = None
        with self._lock:
            self._done, self._error = True, error
            wakes, self._wakes = self._wakes, []
        for wake in wakes:
            wake(None)

    # -- anywhere

    def wait(self, stalled: Callable[[float], None] | None = None, stall_after_s: float = 0.5) -> None:
        self._flush()
        super().wait(stalled, stall_after_s)

    def is_done(self) -> bool:
        return self._done

    def _call_when_done(self, wake: Callable[[object], None]) -> None:
        with self._lock:
            if not self._done:
                self._wakes.append(wake)
                return
        wake(None)

    def _collect(self) -> None:
        if self._error is not None:
            raise self._error


class _Batch:
    """The jobs under way, oldest first."""

    def __init__(self) -> None:
        self._jobs: list[_Ticket] = []
        self._broken: weakref.ref[Communicator] | None = None
        self._why = CollectiveFailed("")

    def begin(self, ticket: _Ticket) -> None:
        earlier = list(self._jobs)
        self._jobs.append(ticket)
        for each in (ticket, *earlier):
            self._advance(each)
        self._forget_ended()

    def run_to_the_end(self) -> None:
        while self._jobs:
            for ticket in self._jobs:
                self._advance(ticket)
            self._forget_ended()

    def _advance(self, ticket: _Ticket) -> None:
        if ticket.is_done():
            return
        if self._broken is not None and ticket.communicator is self._broken():
            ticket.end(copy.copy(self._why))
            return
        try:
            ticket.advance()
        except Exception as error:  # noqa: BLE001 (whoever waits for the job raises it)
            self._break(ticket, error)

    def _break(self, ticket: _Ticket, error: Exception) -> None:
        communicator = ticket.communicator
        assert communicator is not None
        self._broken = weakref.ref(communicator)
        # copies, for an exception that was raised holds the job's communicator and its buffers by its traceback
        self._why = (
            copy.copy(error)
            if isinstance(error, CollectiveFailed)
            else CollectiveFailed(f"an operation before it failed: {error}")
        )
        ticket.end(error)
        for other in self._jobs:
            if other.communicator is communicator:
                other.end(copy.copy(self._why))

    def _forget_ended(self) -> None:
        self._jobs = [ticket for ticket in self._jobs if not ticket.is_done()]


def _run(line: SimpleQueue[_Ticket | _Signal]) -> None:
    batch = _Batch()
    with torch.no_grad():
        while _serve(batch, line.get()):
            pass


def _serve(batch: _Batch, item: _Ticket | _Signal) -> bool:
    """Whether to go on. A function of its own, so that an idle thread holds no ticket."""
    if item is _Signal.STOP:
        return False
    if isinstance(item, _Ticket):
        batch.begin(item)
    else:
        batch.run_to_the_end()
    return True
