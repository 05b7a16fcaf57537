"""The collectives of one generation over NCCL: CUDA tensors, in place in their own memory, on a stream of its own.

What the script has queued before a call comes before the communication, and `wait` returns to the host when it is done,
or when the generation is given up: then ncclCommAbort ends the kernels. Messages between two go through a second NCCL
communicator, so that they need no place in the order of the collectives.

Not yet run on a GPU: its order of calls, its types and its joining are tested against fakes, and so are jobs. The tests
of the contract (tests/contracts) and of a job (tests/faults/test_gpu_job.py), marker gpu, wait for a machine with one.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence

import torch
from torch.distributed import Store  # type: ignore[attr-defined]

from bagua_core.communication import nccl_join, nccl_library
from bagua_core.communication.communicator import (
    AbortFlag,
    CollectiveAborted,
    CollectiveFailed,
    Communicator,
    Pending,
    ReduceOp,
)
from bagua_core.communication.nccl_library import IN_PROGRESS, NCCL_ERRORS, Nccl, NcclHandle
from bagua_core.communication.nccl_stream import CudaStream, Mark, Stream
from bagua_core.communication.pending import DonePending, FailedPending
from bagua_core.communication.reducible import NATIVE, Carrier, carrier_of, check_reducible, sums_in
from bagua_core.communication.reduction import divide, reduce_parts
from bagua_core.communication.shapes import (
    check_allgather,
    check_alltoall,
    check_alltoall_v,
    check_gather,
    check_reduce_scatter,
    check_scatter,
)

# The host asks whether the GPU is done: at once often, for a collective of a small tensor takes tens of microseconds.
_SHORTEST_LOOK_S = 20e-6
_LONGEST_LOOK_S = 1e-3
_LAUNCH_BRIEFLY_S = 1e-3  # an operation among peers that are connected is with the GPU sooner
_ERRORS_EVERY_S = 0.01  # asking NCCL whether a peer has failed costs more than asking for an event


Launch = Generator[None, None, None]
"""Queues an operation's work on the stream. Yields while NCCL is still at it: a first operation connects the peers."""


class _Line:
    """One NCCL communicator, its stream, and the operations that have not been given to the GPU yet, oldest first.

    Nobody blocks for those: whoever starts another or waits moves them on.
    """

    def __init__(self, nccl: Nccl, handle: NcclHandle, stream: Stream, abort_flag: AbortFlag) -> None:
        self.nccl = nccl
        self.handle = handle
        self.stream = stream
        self.abort_flag = abort_flag
        self._lock = threading.Lock()
        self._queue: deque[_Operation] = deque()
        self._is_over = False

    def start(self, what: str, launch: Launch, tensors: Sequence[torch.Tensor]) -> Pending:
        """launch: see Launch; it uses `call` and torch."""
        operation = _Operation(self, what, launch, tensors)
        with self._lock:
            if self.abort_flag.is_set() or self._is_over:
                return FailedPending(CollectiveAborted(self.abort_flag.reason or "closed"))
            try:
                self.stream.after_current()
            except RuntimeError as error:  # CUDA's
                return FailedPending(CollectiveFailed(f"{what}: {error}"))
            self._queue.append(operation)
            give_up_s = time.monotonic() + _LAUNCH_BRIEFLY_S
            while not self._move_on() and time.monotonic() < give_up_s:
                time.sleep(_SHORTEST_LOOK_S)
        return operation

    def move_on(self) -> None:
        with self._lock:
            self._move_on()

    def _move_on(self) -> bool:
        """Under the lock. Whether all have been given to the GPU."""
        queue = self._queue  # an abort may take it away from a call that hangs
        while queue and not self._is_over:
            if not queue[0].launch():
                return False
            queue.popleft()
        return True

    def call(self, act: Callable[[], None]) -> Launch:
        """One call of NCCL, or a group."""
        try:
            act()
        except Exception as error:
            if self.nccl.status_of(error) != IN_PROGRESS:
                raise
            while not self._is_ready():
                yield

    def _is_ready(self) -> bool:
        """Raises NCCL's error if the communicator has failed."""
        try:
            self.handle.check_async_error()
        except Exception as error:
            if self.nccl.status_of(error) == IN_PROGRESS:
                return False
            raise
        return True

    def error_of_peer(self) -> Exception | None:
        """What NCCL found out since."""
        with self._lock:
            if self._is_over:
                return None
            try:
                self._is_ready()
            except NCCL_ERRORS as error:
                return error
        return None

    def end(self, how: Callable[[NcclHandle], None]) -> None:
        """Once; nothing starts afterwards. It may take a while, so a thread does it.

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
        how(self.handle)
        self.stream.give_back()


class _Operation(Pending):
    def __init__(self, line: _Line, what: str, launch: Launch, tensors: Sequence[torch.Tensor]) -> None:
        self._line = line
        self._what = what
        self._launch = launch
        self._tensors = tensors  # kept as long as the GPU may touch them
        self._mark: Mark | None = None
        self.error: CollectiveFailed | None = None

    def launch(self) -> bool:
        """Under the line's lock. Whether it has been given to the GPU, or failed."""
        stream = self._line.stream
        try:
            with torch.no_grad(), stream.on_it():
                next(self._launch)
        except StopIteration:
            self._mark = stream.mark()
            for tensor in self._tensors:
                stream.uses(tensor)
            return True
        except NCCL_ERRORS as error:
            self.error = CollectiveFailed(f"{self._what}: {error}")
            return True
        return False

    def is_done(self) -> bool:
        if self._mark is None and self.error is None:
            self._line.move_on()
        return self.error is not None or (self._mark is not None and self._mark.is_past())

    def wait(self, stalled: Callable[[float], None] | None = None, stall_after_s: float = 0.5) -> None:
        self._sleep(stalled, stall_after_s)
        if self.error is not None:
            raise self.error
        assert self._mark is not None
        self._mark.before_current()

    def _sleep(self, stalled: Callable[[float], None] | None, stall_after_s: float) -> None:
        began_s = time.monotonic()
        told_s = asked_s = began_s
        look_s = _SHORTEST_LOOK_S
        while not self.is_done():
            flag = self._line.abort_flag
            if flag.is_set():
                raise CollectiveAborted(flag.reason or "aborted")
            now_s = time.monotonic()
            if now_s - asked_s >= _ERRORS_EVERY_S:
                asked_s = now_s
                error = self._line.error_of_peer()
                if error is not None:
                    raise CollectiveFailed(f"{self._what}: {error}") from error
            if stalled is not None and now_s - told_s >= stall_after_s:
                told_s = now_s
                stalled(now_s - began_s)
            time.sleep(look_s)
            look_s = min(2 * look_s, _LONGEST_LOOK_S)


class _Messages:
    """Sends and receives that were begun and not waited for: they start together, so that two ranks may both receive
    first. Those of equal tags find each other because each batch is started in the order of tags."""

    def __init__(self, line: _Line) -> None:
        self._line = line
        self._lock = threading.Lock()
        self._batch: list[_Message] = []

    def add(self, peer: int, tag: int, tensor: torch.Tensor, is_send: bool) -> Pending:
        message = _Message(self, peer, tag, tensor, is_send)
        with self._lock:
            self._batch.append(message)
        return message

    def start(self) -> None:
        with self._lock:
            batch, self._batch = sorted(self._batch, key=lambda m: (m.peer, m.tag)), []
            if not batch:
                return
            started = self._line.start("messages", self._launch(batch), [m.tensor for m in batch])
            for message in batch:
                message.started = started

    def _launch(self, batch: Sequence[_Message]) -> Launch:
        return _move(self._line, [(m.peer, _as_bytes(m.tensor), m.is_send) for m in batch])


class _Message(Pending):
    def __init__(self, messages: _Messages, peer: int, tag: int, tensor: torch.Tensor, is_send: bool) -> None:
        self._messages = messages
        self.peer = peer
        self.tag = tag
        self.tensor = tensor
        self.is_send = is_send
        self.started: Pending | None = None

    def wait(self, stalled: Callable[[float], None] | None = None, stall_after_s: float = 0.5) -> None:
        self._under_way().wait(stalled, stall_after_s)

    def is_done(self) -> bool:
        return self._under_way().is_done()

    def _under_way(self) -> Pending:
        if self.started is None:
            self._messages.start()
        assert self.started is not None
        return self.started


def _move(line: _Line, moves: Sequence[tuple[int, torch.Tensor, bool]]) -> Launch:
    """(peer, bytes, whether to send) of several messages that belong together. Empty ones are left out, and so they are
    at the other end."""
    filled = [move for move in moves if move[1].numel()]
    if not filled:
        return
    kind = line.nccl.type_of(torch.uint8)

    def act() -> None:
        for peer, data, is_send in filled:
            move = line.handle.send if is_send else line.handle.recv
            move(data.data_ptr(), data.numel(), kind, peer, line.stream.address)

    yield from line.call(lambda: line.nccl.grouped(act))


class NcclCommunicator(Communicator):
    """Use build_nccl. As GlooCommunicator, but: a message is started when the first of those begun is waited for, and
    between two ranks a batch's messages have the same tags on both sides."""

    def __init__(
        self,
        nccl: Nccl,
        collectives: tuple[NcclHandle, Stream],
        messages: tuple[NcclHandle, Stream],
        device: torch.device,
        generation: int,
        global_rank: int,
        world_size: int,
        abort_flag: AbortFlag,
    ) -> None:
        self.device = device
        self.generation = generation
        self.global_rank = global_rank
        self.world_size = world_size
        self.abort_flag = abort_flag
        self._nccl = nccl
        self._line = _Line(nccl, *collectives, abort_flag)
        self._messages_line = _Line(nccl, *messages, abort_flag)
        self._messages = _Messages(self._messages_line)
        self._end_lock = threading.Lock()
        self._is_ending = False

    # -- reductions

    def allreduce(self, tensor: torch.Tensor, op: ReduceOp = ReduceOp.SUM) -> Pending:
        self._check_usable(tensor)
        check_reducible(tensor.dtype, op)

        def act() -> Launch:
            carrier = carrier_of(tensor, op)  # a wider copy is made on the communicator's stream too
            number = self._nccl.operation_of(carrier.op)
            if number is None:
                yield from self._reduce_gathered(carrier)
            else:
                data, kind = carrier.tensor, self._nccl.type_of(carrier.tensor.dtype)
                yield from self._call(
                    lambda at: self._line.handle.allReduce(
                        data.data_ptr(), data.data_ptr(), data.numel(), kind, number, at
                    )
                )
            self._finish(carrier, op)

        return self._start("allreduce", act(), tensor)

    def reduce(self, tensor: torch.Tensor, destination: int, op: ReduceOp = ReduceOp.SUM) -> Pending:
        self._check_usable(tensor)
        self._check_rank(destination)
        check_reducible(tensor.dtype, op)

        def act() -> Launch:
            carrier = carrier_of(tensor, op)
            number = self._nccl.operation_of(carrier.op)
            if number is None:
                yield from self._reduce_gathered(carrier)
            else:
                data, kind = carrier.tensor, self._nccl.type_of(carrier.tensor.dtype)
                yield from self._call(
                    lambda at: self._line.handle.reduce(
                        data.data_ptr(), data.data_ptr(), data.numel(), kind, number, destination, at
                    )
                )
            if self.global_rank == destination:
                self._finish(carrier, op)

        return self._start("reduce", act(), tensor)

    def _reduce_gathered(self, carrier: Carrier) -> Launch:
        """NCCL has no operations on bits: every rank gets all parts."""
        parts = carrier.tensor.new_empty((self.world_size, *carrier.tensor.shape))
        yield from self._gather_all(parts, carrier.tensor.clone())
        reduce_parts(parts.unbind(0), carrier.op, carrier.tensor)

    def _finish(self, carrier: Carrier, op: ReduceOp) -> None:
        if op is ReduceOp.AVG:
            divide(carrier.tensor, self.world_size)
        if carrier.bring_back is not None:
            carrier.bring_back()

    def reduce_scatter(
        self, output: torch.Tensor, tensor: torch.Tensor, op: ReduceOp = ReduceOp.SUM
    ) -> Pending:
        check_reduce_scatter(self.world_size, output, tensor)
        self._check_usable(output, tensor)
        check_reducible(tensor.dtype, op)
        number = self._nccl.operation_of(op)

        def act() -> Launch:
            if number is None or tensor.dtype not in NATIVE or sums_in(tensor.dtype, op) is not tensor.dtype:
                # of a kind that NCCL does not know, or half precision, which it would round at every rank
                parts = torch.empty_like(tensor)
                yield from self._exchange(parts, tensor)
                reduce_parts(parts.unbind(0), op, output)
                return
            kind = self._nccl.type_of(tensor.dtype)
            yield from self._call(
                lambda at: self._line.handle.reduceScatter(
                    tensor.data_ptr(), output.data_ptr(), output.numel(), kind, number, at
                )
            )
            if op is ReduceOp.AVG:
                divide(output, self.world_size)

        return self._start("reduce_scatter", act(), tensor, output)

    # -- moving bytes

    def broadcast(self, tensor: torch.Tensor, source: int) -> Pending:
        self._check_usable(tensor)
        self._check_rank(source)
        data, kind = _as_bytes(tensor), self._nccl.type_of(torch.uint8)
        return self._start(
            "broadcast",
            self._call(
                lambda at: self._line.handle.broadcast(
                    data.data_ptr(), data.data_ptr(), data.numel(), kind, source, at
                )
            ),
            tensor,
        )

    def allgather(self, output: torch.Tensor, tensor: torch.Tensor) -> Pending:
        check_allgather(self.world_size, output, tensor)
        self._check_usable(output, tensor)
        return self._start("allgather", self._gather_all(output, tensor), tensor, output)

    def _gather_all(self, output: torch.Tensor, tensor: torch.Tensor) -> Launch:
        into, data, kind = _as_bytes(output), _as_bytes(tensor), self._nccl.type_of(torch.uint8)
        yield from self._call(
            lambda at: self._line.handle.allGather(data.data_ptr(), into.data_ptr(), data.numel(), kind, at)
        )

    def gather(self, output: torch.Tensor | None, tensor: torch.Tensor, destination: int) -> Pending:
        self._check_usable(tensor)
        self._check_rank(destination)
        is_destination = self.global_rank == destination
        check_gather(self.world_size, output, tensor, is_destination)
        if not is_destination or output is None:
            moves = [(destination, _as_bytes(tensor), True)]
            return self._start("gather", _move(self._line, moves), tensor)
        self._check_usable(output)
        whole = output

        def act() -> Launch:
            parts = whole.unbind(0)
            parts[self.global_rank].copy_(tensor)
            others = [(r, _as_bytes(part), False) for r, part in enumerate(parts) if r != self.global_rank]
            yield from _move(self._line, others)

        return self._start("gather", act(), tensor, whole)

    def scatter(self, output: torch.Tensor, tensor: torch.Tensor | None, source: int) -> Pending:
        self._check_usable(output)
        self._check_rank(source)
        is_source = self.global_rank == source
        check_scatter(self.world_size, output, tensor, is_source)
        if not is_source or tensor is None:
            moves = [(source, _as_bytes(output), False)]
            return self._start("scatter", _move(self._line, moves), output)
        self._check_usable(tensor)
        whole = tensor

        def act() -> Launch:
            parts = whole.unbind(0)
            output.copy_(parts[self.global_rank])
            others = [(r, _as_bytes(part), True) for r, part in enumerate(parts) if r != self.global_rank]
            yield from _move(self._line, others)

        return self._start("scatter", act(), whole, output)

    def alltoall(self, output: torch.Tensor, tensor: torch.Tensor) -> Pending:
        check_alltoall(self.world_size, output, tensor)
        self._check_usable(output, tensor)
        return self._start("alltoall", self._exchange(output, tensor), tensor, output)

    def alltoall_v(
        self,
        output: torch.Tensor,
        tensor: torch.Tensor,
        output_splits: Sequence[int],
        input_splits: Sequence[int],
    ) -> Pending:
        check_alltoall_v(self.world_size, output, tensor, output_splits, input_splits)
        self._check_usable(output, tensor)
        is_empty = not math.prod(tensor.shape[1:])
        splits = (list(output_splits), list(input_splits))
        return self._start(
            "alltoall_v",
            self._exchange(output, tensor, splits),
            tensor,
            output,
            # who has nothing to send may have something to receive
            is_empty=is_empty,
        )

    def _exchange(
        self, output: torch.Tensor, tensor: torch.Tensor, splits: tuple[list[int], list[int]] | None = None
    ) -> Launch:
        """splits: rows of output and tensor for each rank; default: one."""
        ones = [1] * self.world_size
        into = torch.split(output, splits[0] if splits else ones)
        parts = torch.split(tensor, splits[1] if splits else ones)
        own = self.global_rank
        into[own].copy_(parts[own])
        moves: list[tuple[int, torch.Tensor, bool]] = []
        for step in range(1, self.world_size):  # everybody begins with another peer
            to, source = (own + step) % self.world_size, (own - step) % self.world_size
            moves += [(to, _as_bytes(parts[to]), True), (source, _as_bytes(into[source]), False)]
        yield from _move(self._line, moves)

    # -- messages

    def send(self, tensor: torch.Tensor, destination: int, tag: int) -> Pending:
        return self._message(tensor, destination, tag, is_send=True)

    def receive(self, tensor: torch.Tensor, source: int, tag: int) -> Pending:
        return self._message(tensor, source, tag, is_send=False)

    def _message(self, tensor: torch.Tensor, peer: int, tag: int, is_send: bool) -> Pending:
        self._check_usable(tensor)
        self._check_rank(peer)
        if self.abort_flag.is_set():
            return FailedPending(CollectiveAborted(self.abort_flag.reason or "aborted"))
        if not tensor.numel():
            return DonePending()
        return self._messages.add(peer, tag, tensor, is_send)

    def barrier(self) -> Pending:
        return self.allreduce(torch.zeros(1, dtype=torch.uint8, device=self.device), ReduceOp.MAX)

    # -- the end

    def abort(self, reason: str) -> None:
        super().abort(reason)  # waits end now, the GPU's work in a moment
        self._end("nccl-abort", lambda handle: handle.abort())

    def close(self) -> None:
        super().close()
        self._end("nccl-close", lambda handle: handle.destroy())

    def _end(self, name: str, how: Callable[[NcclHandle], None]) -> None:
        with self._end_lock:
            if self._is_ending:
                return
            self._is_ending = True
        for line in (self._line, self._messages_line):
            threading.Thread(target=line.end, args=(how,), name=name, daemon=True).start()

    # -- shared by all

    def _start(
        self,
        what: str,
        launch: Launch,
        tensor: torch.Tensor,
        *others: torch.Tensor,
        is_empty: bool | None = None,
    ) -> Pending:
        if self.abort_flag.is_set():
            return FailedPending(CollectiveAborted(self.abort_flag.reason or "aborted"))
        if not tensor.numel() if is_empty is None else is_empty:
            return DonePending()
        return self._line.start(what, launch, (tensor, *others))

    def _call(self, act: Callable[[int], None]) -> Launch:
        """act: one call of NCCL on the stream whose address it gets."""
        yield from self._line.call(lambda: act(self._line.stream.address))

    def _check_rank(self, global_rank: int) -> None:
        if not 0 <= global_rank < self.world_size:
            raise ValueError(f"global_rank {global_rank} is not in a world of {self.world_size}")

    def _check_usable(self, *tensors: torch.Tensor) -> None:
        for tensor in tensors:
            if tensor.device != self.device:
                raise ValueError(
                    f"this NCCL communicator carries tensors of {self.device}, not {tensor.device}"
                )
            if not tensor.is_contiguous():
                raise ValueError(
                    f"a collective needs a contiguous tensor; this one has strides {tensor.stride()}"
                )


def build_nccl(
    generation: int,
    global_rank: int,
    world_size: int,
    store: Store,
    device: torch.device,
    timeout_s: float,
    abort_flag: AbortFlag,
) -> NcclCommunicator:
    """Meet all members of the generation through `store` and connect, each with `device` (cuda, with its index).

    Call it in a thread of its own and leave that behind if the generation is given up (see nccl_join.join). The store's
    own time-out bounds the meeting, timeout_s each of the two connections.
    Raises NcclUnavailableError, CollectiveFailed, CollectiveAborted.
    """
    nccl = nccl_library.load()
    torch.cuda.set_device(device)  # of this thread
    library = nccl_library.loaded_library()
    lines: list[tuple[NcclHandle, Stream]] = []
    try:
        for name in ("collectives", "messages"):
            unique_id = nccl_join.share_unique_id(nccl, store, name, global_rank, world_size)
            if abort_flag.is_set():
                raise CollectiveAborted(abort_flag.reason or "aborted")
            handle = nccl_join.join(nccl, library, unique_id, world_size, global_rank, timeout_s, abort_flag)
            lines.append((handle, CudaStream(device)))
        if abort_flag.is_set():
            raise CollectiveAborted(abort_flag.reason or "aborted")
    except Exception:
        for handle, stream in lines:
            handle.abort()
            stream.give_back()
        raise
    return NcclCommunicator(nccl, lines[0], lines[1], device, generation, global_rank, world_size, abort_flag)


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as bytes: moving data must not depend on which types NCCL can add."""
    return tensor.reshape(-1).view(torch.uint8)
