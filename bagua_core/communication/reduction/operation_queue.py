"""Runs operations of several collectives beside the script's thread, in one order on all ranks.

Owns one thread, and with it the order in which collectives are started, which must be the same on all ranks: a
transport matches them by it. So the order follows from the launches and the flushes alone, never from the time that
anything takes. Knows neither buckets nor steps.

A job is a generator: it yields what it waits for and goes on when that is done. Between two flushes each launch moves
every earlier job on by one wait, after the new one has begun: the network works on one job while the processor works
on another. A flush ends the batch: all its jobs run to their ends before a later one begins.

On a GPU jobs run on a stream of the queue: after what the launching thread's stream had been given at the launch,
and before what the stream of the thread that waits is given afterwards. The thread of the queue never waits for
the device: a job goes on as soon as its collective is with the GPU. The host waits in `wait`, and not in `follow`.
"""

from __future__ import annotations

import copy
import os
import threading
import weakref
from collections.abc import Callable, Generator, Sequence
from enum import Enum
from queue import SimpleQueue

import torch

from bagua_core import tracing
from bagua_core.communication.communicator import CollectiveFailed, Communicator, Pending
from bagua_core.communication.devices import device_order
from bagua_core.communication.devices.device_order import DeviceOrder, Moment, SideStream
from bagua_core.communication.devices.device_wait import StallReports
from bagua_core.communication.pending import Completion, WakeablePending

Job = Generator[Pending, None, None]


class _Signal(Enum):
    """The messages to the queue's thread beside jobs."""

    FLUSH = "flush"
    STOP = "stop"


class OperationQueue:
    """Runs jobs in a thread of its own. There is one per engine, see operation_queue_of. Its thread begins with the
    first launch, and ends with this object or the process; a forked child gets a thread of its own."""

    def __init__(self) -> None:
        self._pid = 0
        self._line: SimpleQueue[_Ticket | _Signal] = SimpleQueue()
        self._is_open = False

    def launch(
        self, communicator: Communicator, job: Job, tensors: Sequence[torch.Tensor] | None = None
    ) -> Pending:
        """Runs `job`, whose collectives are of `communicator` or its lanes. Never blocks.

        tensors: what the job reads or writes of the launching thread's, on one device; None: anything on the current
        device. Once a job of a communicator has failed no other of it is begun or goes on, for peers would take one
        collective for another. Waiting for the result flushes. Call it from one thread at a time, in the same order on
        all ranks.
        """
        if self._pid != os.getpid():
            self._begin()
        order = device_order.current_order() if tensors is None else device_order.order_of(tensors)
        ticket = _Ticket(communicator, job, self.flush, order, tensors or ())
        self._is_open = True
        self._line.put(ticket)
        return ticket

    def flush(self) -> None:
        """Ends the batch: the jobs launched so far wait for no later one."""
        if self._is_open and self._pid == os.getpid():
            self._is_open = False
            self._line.put(_Signal.FLUSH)

    def _begin(self) -> None:
        self._pid = os.getpid()
        self._line = SimpleQueue()
        threading.Thread(target=_run, args=(self._line,), name="bagua-operations", daemon=True).start()
        weakref.finalize(self, self._line.put, _Signal.STOP).atexit = False


_operation_queues: weakref.WeakKeyDictionary[object, OperationQueue] = weakref.WeakKeyDictionary()


def operation_queue_of(engine: object) -> OperationQueue:
    """Returns the queue that all models of an engine share, so that their collectives have one order."""
    return _operation_queues.setdefault(engine, OperationQueue())


class _Ticket(WakeablePending):
    """A job, and the wait for its end."""

    def __init__(
        self,
        communicator: Communicator,
        job: Job,
        flush: Callable[[], None],
        order: DeviceOrder,
        tensors: Sequence[torch.Tensor],
    ) -> None:
        super().__init__(communicator.abort_flag)
        self.communicator: Communicator | None = communicator
        self.order = order
        self._launched: Moment | None = order.now()  # until the job has begun
        self._tensors = tensors
        self._ended: Moment | None = None  # of the job's work on the device
        self._job: Job | None = job
        self._flush = flush
        self._awaited: Pending | None = None
        self._completion = Completion()

    @property
    def has_ended(self) -> bool:
        """Whether nothing more of the job is given to the device."""
        return self._completion.is_over

    # -- in the queue's thread

    def advance(self, stream: SideStream) -> None:
        """Runs the job to its next wait, or its end. stream: the queue's. Raises whatever the job raises."""
        assert self._job is not None
        with stream.on_it():
            self._come_after_launch(stream)
            if self._awaited is not None:
                with tracing.span("wait"):
                    self._awaited.follow()
            try:
                with tracing.span(getattr(self._job, "__name__", "job")):
                    self._awaited = next(self._job)
            except StopIteration:
                self._ended = stream.mark()
                self.end(None)

    def _come_after_launch(self, stream: SideStream) -> None:
        launched, self._launched = self._launched, None
        if launched is not None:
            launched.before_current()
            for tensor in self._tensors:
                stream.uses(tensor)

    def end(self, error: Exception | None) -> None:
        job, self._job = self._job, None
        if job is not None:
            job.close()
        # A bucket keeps its last ticket, which must not keep a communicator from being let go.
        self.communicator = self._awaited = self._launched = None
        self._tensors = ()
        self._completion.end(error)

    # -- anywhere

    def wait(self, stalled: Callable[[float], None] | None = None, stall_after_s: float = 0.5) -> None:
        reports = StallReports(stalled, stall_after_s)
        self.follow(stalled, stall_after_s)
        assert self._ended is not None

        def look() -> None:
            self.check()
            reports.look()

        self._ended.wait(look)

    def follow(self, stalled: Callable[[float], None] | None = None, stall_after_s: float = 0.5) -> None:
        self._flush()
        super().wait(stalled, stall_after_s)

    def check(self) -> None:
        self._raise_error()
        self._abort_flag.check()

    def is_done(self) -> bool:
        return self._completion.is_over and (self._ended is None or self._ended.is_past())

    def _call_when_done(self, wake: Callable[[object], None]) -> None:
        """Calls `wake` when the job has ended; the device may still be at it."""
        self._completion.call_when_over(wake)

    def _collect(self) -> None:
        self._raise_error()
        self._come_before_waiter()

    def _raise_error(self) -> None:
        if self._completion.error is not None:
            raise self._completion.error

    def _come_before_waiter(self) -> None:
        assert self._ended is not None
        self._ended.before_current()


class _Batch:
    """The jobs under way, oldest first."""

    def __init__(self) -> None:
        self._jobs: list[_Ticket] = []
        self._streams: dict[DeviceOrder, SideStream] = {}
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
        if ticket.has_ended:
            return
        if self._broken is not None and ticket.communicator is self._broken():
            ticket.end(copy.copy(self._why))
            return
        try:
            ticket.advance(self._stream_of(ticket.order))
        except Exception as error:  # noqa: BLE001 (the wait for the job raises it)
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
        is_older = ticket in self._jobs
        for other in self._jobs:
            if other is ticket:
                is_older = False
            elif other.communicator is communicator:
                # Waits come in the order of launches, so one for an older job shows the script its own mistake.
                other.end(
                    error if is_older and not isinstance(error, CollectiveFailed) else copy.copy(self._why)
                )

    def _stream_of(self, order: DeviceOrder) -> SideStream:
        """Returns the queue's stream of a device. One is enough: scratch memory that jobs use one after the other
        needs no other order."""
        stream = self._streams.get(order)
        if stream is None:
            stream = self._streams[order] = order.side_stream()
        return stream

    def _forget_ended(self) -> None:
        self._jobs = [ticket for ticket in self._jobs if not ticket.has_ended]


def _run(line: SimpleQueue[_Ticket | _Signal]) -> None:
    batch = _Batch()
    with torch.no_grad():
        while _serve(batch, line.get()):
            pass


def _serve(batch: _Batch, item: _Ticket | _Signal) -> bool:
    """Handles one item and returns whether to go on. It is a function of its own, so that an idle thread holds no
    ticket."""
    if item is _Signal.STOP:
        return False
    if isinstance(item, _Ticket):
        batch.begin(item)
    else:
        batch.run_to_the_end()
    return True
