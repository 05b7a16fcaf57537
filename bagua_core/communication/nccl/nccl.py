"""Carries the collectives of one generation over NCCL: CUDA tensors, in their own memory, on a stream of its own.

The order of the work on a GPU, and waits, are nccl_line.py's. Messages between two go through a second NCCL
communicator, so that they need no place in the order of the collectives.

Not yet run on a GPU: its order of calls, its types and its joining are tested against fakes, and so are jobs. The
tests of the contract (tests/communicators) and of a job (tests/faults/test_gpu_job.py), marker gpu, wait for a machine
with one.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence

import torch
from torch.distributed import Store  # type: ignore[attr-defined]

from bagua_core.communication import traffic
from bagua_core.communication.arithmetic import divide, reduce_parts
from bagua_core.communication.communicator import (
    STATE_TAG,
    AbortFlag,
    CollectiveAborted,
    Communicator,
    Pending,
    ReduceOp,
)
from bagua_core.communication.flight_record import FlightRecord
from bagua_core.communication.nccl import nccl_join, nccl_library
from bagua_core.communication.nccl.nccl_end import ABORTS, abort_handle
from bagua_core.communication.nccl.nccl_library import Nccl, NcclHandle
from bagua_core.communication.nccl.nccl_line import Launch, NcclLine
from bagua_core.communication.nccl.nccl_messages import NcclMessages, as_bytes, move_bytes
from bagua_core.communication.nccl.nccl_stream import CudaStream, Stream
from bagua_core.communication.pending import DonePending, FailedPending
from bagua_core.communication.reducible import NATIVE, Carrier, carrier_of, check_reducible, sums_in
from bagua_core.communication.shapes import (
    check_allgather,
    check_alltoall,
    check_alltoall_v,
    check_gather,
    check_reduce_scatter,
    check_scatter,
)


class NcclCommunicator(Communicator):
    """A communicator over NCCL, made by build_nccl. It behaves as GlooCommunicator, but a message is started when the
    first of those begun is waited for, and between two ranks a batch's messages have the same tags on both sides."""

    flight: FlightRecord

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
        self.flight = FlightRecord("nccl", generation, global_rank, abort_flag)
        self._nccl = nccl
        self._line = NcclLine(nccl, *collectives, abort_flag)
        self._messages_line = NcclLine(nccl, *messages, abort_flag)
        self._messages = NcclMessages(self._messages_line)
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
        """Reduces by gathering all parts on every rank, because NCCL has no operations on bits."""
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
        data, kind = as_bytes(tensor), self._nccl.type_of(torch.uint8)
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
        into, data, kind = as_bytes(output), as_bytes(tensor), self._nccl.type_of(torch.uint8)
        yield from self._call(
            lambda at: self._line.handle.allGather(data.data_ptr(), into.data_ptr(), data.numel(), kind, at)
        )

    def gather(self, output: torch.Tensor | None, tensor: torch.Tensor, destination: int) -> Pending:
        self._check_usable(tensor)
        self._check_rank(destination)
        is_destination = self.global_rank == destination
        check_gather(self.world_size, output, tensor, is_destination)
        if not is_destination or output is None:
            moves = [(destination, as_bytes(tensor), True)]
            return self._start("gather", move_bytes(self._line, moves), tensor)
        self._check_usable(output)
        whole = output

        def act() -> Launch:
            parts = whole.unbind(0)
            parts[self.global_rank].copy_(tensor)
            others = [(r, as_bytes(part), False) for r, part in enumerate(parts) if r != self.global_rank]
            yield from move_bytes(self._line, others)

        return self._start("gather", act(), tensor, whole)

    def scatter(self, output: torch.Tensor, tensor: torch.Tensor | None, source: int) -> Pending:
        self._check_usable(output)
        self._check_rank(source)
        is_source = self.global_rank == source
        check_scatter(self.world_size, output, tensor, is_source)
        if not is_source or tensor is None:
            moves = [(source, as_bytes(output), False)]
            return self._start("scatter", move_bytes(self._line, moves), output)
        self._check_usable(tensor)
        whole = tensor

        def act() -> Launch:
            parts = whole.unbind(0)
            output.copy_(parts[self.global_rank])
            others = [(r, as_bytes(part), True) for r, part in enumerate(parts) if r != self.global_rank]
            yield from move_bytes(self._line, others)

        return self._start("scatter", act(), output, whole)

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
        """Sends rows to each rank and receives rows from each. splits: rows of output and tensor for each rank;
        default: one."""
        ones = [1] * self.world_size
        into = torch.split(output, splits[0] if splits else ones)
        parts = torch.split(tensor, splits[1] if splits else ones)
        own = self.global_rank
        into[own].copy_(parts[own])
        moves: list[tuple[int, torch.Tensor, bool]] = []
        for step in range(1, self.world_size):  # each rank begins with a different peer
            to, source = (own + step) % self.world_size, (own - step) % self.world_size
            moves += [(to, as_bytes(parts[to]), True), (source, as_bytes(into[source]), False)]
        yield from move_bytes(self._line, moves)

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
        if is_send and tag != STATE_TAG:
            traffic.to_collectives.add(tensor.nbytes)
        what = "send" if is_send else "receive"
        return self.flight.message(what, tensor.nbytes, peer, self._messages.add(peer, tag, tensor, is_send))

    def barrier(self) -> Pending:
        return self.allreduce(torch.zeros(1, dtype=torch.uint8, device=self.device), ReduceOp.MAX)

    # -- the end

    def abort(self, reason: str) -> None:
        super().abort(reason)  # waits end now, the GPU's work in a moment
        self._end("nccl-abort", self._abort_line)

    def close(self) -> None:
        super().close()
        self._end("nccl-close", lambda line: line.end(lambda handle: handle.destroy()))

    def _end(self, name: str, how: Callable[[NcclLine], None]) -> None:
        with self._end_lock:
            if self._is_ending:
                return
            self._is_ending = True
        for line in (self._line, self._messages_line):
            if name == "nccl-abort":
                ABORTS.begin()  # from now on: a generation that is begun after this call waits for its end
            threading.Thread(target=how, args=(line,), name=name, daemon=True).start()

    @staticmethod
    def _abort_line(line: NcclLine) -> None:
        try:
            line.end(abort_handle)
        finally:
            ABORTS.returned()

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
        if self.world_size > 1:
            traffic.to_collectives.add(tensor.nbytes)
        pending = self._line.start(what, launch, (tensor, *others))
        return self.flight.collective(what, tensor.nbytes, pending)

    def _call(self, act: Callable[[int], None]) -> Launch:
        """Runs one call of NCCL. act: makes the call, on the stream whose address it gets."""
        yield from self._line.call(lambda: act(self._line.stream.address))

    def drain(self) -> list[Pending]:
        return [*super().drain(), self._line.drain(), self._messages_line.drain()]

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
    """Meets all members of the generation through `store` and connects, each with `device` (cuda, with its index).

    Call it in a thread of its own and leave that behind if the generation is given up (see nccl_join.join). The store's
    own time-out bounds the meeting, timeout_s each of the two connections. What this process aborted has ended before
    it joins, so a failover joins beside no kernel of the lost generation. Raises NcclUnavailableError,
    CollectiveFailed, CollectiveAborted.
    """
    nccl = nccl_library.load()
    torch.cuda.set_device(device)  # of this thread, which is the runtime's own
    library = nccl_library.loaded_library()
    lines: list[tuple[NcclHandle, Stream]] = []
    try:
        for name in ("collectives", "messages"):
            # Before this rank says that it is here: only then does the others' time begin
            ABORTS.wait(abort_flag)
            unique_id = nccl_join.share_unique_id(nccl, store, name, global_rank, world_size)
            if abort_flag.is_set():
                raise CollectiveAborted(abort_flag.reason or "aborted")
            handle = nccl_join.join(nccl, library, unique_id, world_size, global_rank, timeout_s, abort_flag)
            lines.append((handle, CudaStream(device)))
        if abort_flag.is_set():
            raise CollectiveAborted(abort_flag.reason or "aborted")
    except Exception:
        for handle, stream in lines:
            abort_handle(handle)
            stream.give_back()
        raise
    return NcclCommunicator(nccl, lines[0], lines[1], device, generation, global_rank, world_size, abort_flag)
