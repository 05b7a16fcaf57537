"""Runs the operations of one NCCL communicator, in the order in which they were started, on a stream of its own.

What the calling thread's stream was given before a start comes before the operation. `follow` puts the operation before
what that stream is given afterwards, and does not wait for the GPU; `wait` returns to the host when the operation is
done, or when the generation is given up: then ncclCommAbort ends the kernels. No call sleeps: a communicator that is
still at an earlier operation is asked again by the next start and by waits.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence

import torch

from bagua_core.communication.communicator import AbortFlag, CollectiveAborted, CollectiveFailed, Pending
from bagua_core.communication.devices.device_order import Moment
from bagua_core.communication.devices.device_wait import StallReports
from bagua_core.communication.nccl.nccl_library import IN_PROGRESS, Nccl, NcclHandle
from bagua_core.communication.nccl.nccl_stream import Stream
from bagua_core.communication.pending import DonePending, FailedPending

_LOOK_S = 20e-6  # at a communicator that is still at an operation among peers that are not connected yet
_LONGEST_LOOK_S = 1e-3
_ERRORS_EVERY_S = 0.01  # asking NCCL whether a peer has failed costs more than asking for an event


Launch = Generator[None, None, None]
"""Queues an operation's work on the stream. Yields while NCCL is still at it: a first operation connects the peers."""


class NcclLine:
    """One NCCL communicator, its stream, and the operations that have not been given to the GPU yet, oldest first.

    No call blocks for those: the next start or wait moves them on.
    """

    def __init__(self, nccl: Nccl, handle: NcclHandle, stream: Stream, abort_flag: AbortFlag) -> None:
        self.nccl = nccl
        self.handle = handle
        self.stream = stream
        self.abort_flag = abort_flag
        self._lock = threading.Lock()
        self._queue: deque[NcclOperation] = deque()
        self._is_over = False
        self._broken_by: Exception | None = None  # peers are in an operation that this rank did not begin
        self._asked_s = time.monotonic()
        abort_flag.watch(self.check)

    def start(self, what: str, launch: Launch, tensors: Sequence[torch.Tensor]) -> Pending:
        """Starts an operation. launch: see Launch; it uses `call` and torch."""
        with self._lock:
            if self.abort_flag.is_set() or self._is_over:
                return FailedPending(CollectiveAborted(self.abort_flag.reason or "closed"))
            operation = NcclOperation(self, what, launch, tensors, self.stream.now())
            self._queue.append(operation)
            self._move_on()
        return operation

    def drain(self) -> Pending:
        """Returns an operation that is done once the GPU has done all that was started so far. An error of a peer does
        not end the wait, for one that left may have aborted this communicator; an abort does."""
        with self._lock:
            if self.abort_flag.is_set() or self._is_over:
                return DonePending()  # what it was given ends, and no communicator is joined before it has
            draining = _Draining(self, "draining", _nothing(), (), self.stream.now())
            self._queue.append(draining)
            self._move_on()
        return draining

    def move_on(self) -> None:
        with self._lock:
            self._move_on()

    def _move_on(self) -> None:
        """Gives the queued operations to the GPU, oldest first, as far as possible. Called under the lock."""
        queue = self._queue  # an abort may take it away from a call that hangs
        while queue and not self._is_over:
            operation = queue[0]
            if self._broken_by is not None:
                operation.error = CollectiveFailed(f"an operation before it failed: {self._broken_by}")
            elif not operation.launch():
                return
            elif operation.error is not None and not isinstance(operation.error, CollectiveFailed):
                self._broken_by = operation.error
            queue.popleft()

    def call(self, act: Callable[[], None]) -> Launch:
        """Makes one call of NCCL, or a group, and yields while NCCL is still at it."""
        try:
            act()
        except Exception as error:
            if self.nccl.status_of(error) != IN_PROGRESS:
                raise
            while not self._is_ready():
                yield

    def _is_ready(self) -> bool:
        """Tells whether the communicator has finished its call. Raises NCCL's error if the communicator has failed."""
        try:
            self.handle.check_async_error()
        except Exception as error:
            if self.nccl.status_of(error) == IN_PROGRESS:
                return False
            raise
        return True

    def check(self) -> None:
        """Raises what NCCL found out since about its peers. Asks seldom, and not while a call is under way."""
        now_s = time.monotonic()
        if now_s - self._asked_s < _ERRORS_EVERY_S or not self._lock.acquire(blocking=False):
            return
        try:
            self._asked_s = now_s
            if not self._is_over:
                self._is_ready()
        except Exception as error:
            if self.nccl.status_of(error) is None:
                raise
            raise CollectiveFailed(f"NCCL: {error}") from error
        finally:
            self._lock.release()

    def end(self, how: Callable[[NcclHandle], None]) -> None:
        """Ends the communicator by `how`, once; nothing starts afterwards. It may take a while, so a thread does it.

        An abort does not wait for long for a call that hangs: making it end is what the abort is for.
        """
        has_lock = self._lock.acquire(timeout=1.0)
        try:
            if self._is_over:
                return
            self._is_over = True
            given_up, self._queue = self._queue, deque()
            for operation in given_up:
                operation.error = CollectiveAborted(self.abort_flag.reason or "closed")
        finally:
            if has_lock:
                self._lock.release()
        with self.stream.on_it():  # NCCL selects this thread's device again afterwards: it must not be GPU 0
            how(self.handle)
        self.stream.give_back()


class NcclOperation(Pending):
    def __init__(
        self, line: NcclLine, what: str, launch: Launch, tensors: Sequence[torch.Tensor], begins_after: Moment
    ) -> None:
        self._line = line
        self._what = what
        self._launch = launch
        self._tensors = tensors  # kept as long as the GPU may touch them
        self._begins_after: Moment | None = begins_after  # until it was given to the GPU
        self._mark: Moment | None = None
        self.error: Exception | None = None

    def launch(self) -> bool:
        """Gives the operation to the GPU, and returns whether it has been given, or failed. Called under the line's
        lock."""
        stream = self._line.stream
        try:
            with torch.no_grad(), stream.on_it():
                self._come_after_start()
                next(self._launch)
        except StopIteration:
            self._mark = stream.mark()
            for tensor in self._tensors:
                stream.uses(tensor)
            return True
        except Exception as error:  # noqa: BLE001 (the wait for the operation raises it)
            is_of_nccl = self._line.nccl.status_of(error) is not None
            self.error = CollectiveFailed(f"{self._what}: {error}") if is_of_nccl else error
            return True
        return False

    def _come_after_start(self) -> None:
        begins_after, self._begins_after = self._begins_after, None
        if begins_after is not None:
            begins_after.before_current()

    def _is_with_gpu(self) -> bool:
        """Tells whether the operation has been given to the GPU, or has failed."""
        if self._mark is None and self.error is None:
            self._line.move_on()
        return self._mark is not None or self.error is not None

    def is_done(self) -> bool:
        return self._is_with_gpu() and (
            self.error is not None or (self._mark is not None and self._mark.is_past())
        )

    def is_known_done(self) -> bool:
        mark = self._mark
        return self.error is not None or (mark is not None and mark.is_past())

    def wait(self, stalled: Callable[[float], None] | None = None, stall_after_s: float = 0.5) -> None:
        reports = StallReports(stalled, stall_after_s)
        mark = self._given_to_gpu(reports)

        def look() -> None:
            self.check()
            reports.look()

        mark.wait(look)
        mark.before_current()

    def follow(self, stalled: Callable[[float], None] | None = None, stall_after_s: float = 0.5) -> None:
        mark = self._given_to_gpu(StallReports(stalled, stall_after_s))
        self._line.abort_flag.check()
        mark.before_current()

    def check(self) -> None:
        if self.error is not None:
            raise self.error
        try:
            self._line.check()
            self._line.abort_flag.check()
        except CollectiveAborted:
            raise
        except CollectiveFailed as error:
            raise CollectiveFailed(f"{self._what}: {error}") from error

    def _given_to_gpu(self, reports: StallReports) -> Moment:
        """Waits while NCCL connects the peers of a first operation."""
        look_s = _LOOK_S
        while not self._is_with_gpu():
            self.check()
            reports.look()
            time.sleep(look_s)
            look_s = min(2 * look_s, _LONGEST_LOOK_S)
        if self.error is not None:
            raise self.error
        assert self._mark is not None
        return self._mark


class _Draining(NcclOperation):
    def check(self) -> None:
        if self._line.abort_flag.is_set():
            raise CollectiveAborted(self._line.abort_flag.reason or "aborted")


def _nothing() -> Launch:
    yield from ()
