"""Sums a bucket with compressed messages. Every rank sums one chunk of it.

A rank compresses its bucket in as many chunks as there are ranks and sends each to its owner (all-to-all); the owner
decompresses and adds them in fp32, in rank order, and compresses the sum; all sums go to all ranks (all-gather), which
decompress them, their own too, so that all ranks have the same bits. With several workers on a node the node's sum is
made first, uncompressed, one worker of each node does the above, and passes on to the others what it gathered.

Owns the messages and their memory. compression.py handles lost precision, and operation_queue.py the order of the
collectives. Invariants: a rank is done with a bucket only if all ranks have contributed to it, since every all-gather
waits for every owner and every owner for all ranks; the tail travels uncompressed behind the sums.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass

import torch

from bagua_core.communication.communicator import Communicator, Pending
from bagua_core.communication.compressed.chunks import Chunks
from bagua_core.communication.compressed.compression import Coder, Compression, StepErrors, WithFeedback
from bagua_core.communication.compressed.scratch import Scratch
from bagua_core.communication.devices import device_order
from bagua_core.communication.pending import DonePending
from bagua_core.communication.reduction.bucket_buffer import TAIL_ELEMENTS, Bucket
from bagua_core.communication.reduction.bucket_operation import BucketOperation
from bagua_core.communication.reduction.buckets import BucketPlan
from bagua_core.communication.reduction.operation_queue import Job, OperationQueue
from bagua_core.communication.step_interface import StepReductions
from bagua_core.communication.topology.routes import FIRST_OF_NODE, Route, route_of
from bagua_core.kernels.formats import ALIGNMENT
from bagua_core.kernels.interface import VALUE_DTYPES

# Two small messages in succession take longer than one that is four times as large: between four hosts with 100 Mbit/s
# up to about 20,000 values.
LEAST_ELEMENTS = 16384

_NUMBERS_BYTES = TAIL_ELEMENTS * torch.float32.itemsize
_TAIL_BYTES = -(-_NUMBERS_BYTES // ALIGNMENT) * ALIGNMENT  # whatever lies behind stays aligned


def is_compressed(plan: BucketPlan, route: Route) -> bool:
    return route.parties > 1 and plan.dtype in VALUE_DTYPES and plan.elements >= LEAST_ELEMENTS


@dataclass(frozen=True, slots=True)
class Load:
    """The full bucket that a job works on: the bucket itself may get other memory while the job still runs.

    values: [plan.elements]; tail: the bucket's, see bucket_buffer.py. parameters: the members, in the plan's order.
    views: of their gradients.
    """

    number: int
    plan: BucketPlan
    reducible: torch.Tensor
    flat: torch.Tensor
    parameters: Sequence[torch.Tensor]
    views: Sequence[torch.Tensor]
    weight: float
    step: StepErrors
    scratch: Scratch

    @property
    def values(self) -> torch.Tensor:
        return self.flat[: self.plan.elements]

    @property
    def tail(self) -> torch.Tensor | None:
        return self.flat[self.plan.elements :] if self.flat.numel() > self.plan.elements else None


class CompressedSum(BucketOperation):
    """The operation that sums buckets with compressed messages. Buckets that are too small, or not of floats, are
    summed as they are. Nothing is kept from step to step. Which buckets are summed flat in spite of `hierarchical`: see
    HierarchicalSum."""

    carries_pair = True
    takes_new_buckets = True

    def __init__(
        self,
        operation_queue: OperationQueue,
        compression: Compression,
        hierarchical: bool,
        replica_size: int = 1,
    ) -> None:
        self._operations = operation_queue
        self._compression = compression
        self._hierarchical = hierarchical
        self._replica_size = replica_size
        self._scratch = Scratch()

    def launch(
        self, communicator: Communicator | None, bucket: Bucket, number: int, weight: float
    ) -> Pending:
        assert communicator is not None
        load = Load(
            number,
            bucket.plan,
            bucket.reducible,
            bucket.flat,
            bucket.parameters,
            bucket.views,
            weight,
            self._compression.step,
            self._scratch,
        )
        return self._operations.launch(communicator, self._sum(communicator, load), (bucket.flat,))

    def reduced(self) -> None:
        self._compression.reduced()

    def failed(self) -> None:
        self._operations.flush()
        self._compression.failed()
        self._scratch = Scratch()

    # -- in the operation queue's thread

    def _sum(self, communicator: Communicator, load: Load) -> Job:
        route = self._route(communicator, load.plan)
        if not is_compressed(load.plan, route):
            self._add_unsent(load)
            yield communicator.allreduce(load.reducible)
            return
        messages = yield from self._exchange(load, route)
        messages.decompress(messages.gathered)
        messages.give_back()

    def _route(self, communicator: Communicator, plan: BucketPlan) -> Route:
        # on a single node no lane has stages, so that the order of a sum does not depend on the lane
        by_node = communicator.job_has_one_node or plan.sharding.gives_each_its_own(self._replica_size)
        return route_of(communicator, self._hierarchical and by_node)

    def _exchange(self, load: Load, route: Route) -> Generator[Pending, None, Messages]:
        """Exchanges the chunks, so that the sums of all of them arrive in `gathered`, on every rank."""
        if route.node is not None:
            if route.across is None:
                self._add_unsent(load)
            yield route.node.reduce(load.flat, FIRST_OF_NODE)
        messages = Messages(load, self._compression, route)
        if route.across is not None:
            coder = messages.compress(route.across.global_rank)
            yield route.across.alltoall(messages.received, messages.sent)
            messages.reduce(coder)
            yield route.across.allgather(messages.gathered, messages.own)
        else:
            # as many waits as the first of the node has, so that the node's collectives keep one order
            yield DonePending()
            yield DonePending()
        if route.node is not None:
            yield route.node.broadcast(messages.gathered, FIRST_OF_NODE)
        messages.sum_tail()
        return messages

    def _add_unsent(self, load: Load) -> None:
        """Adds to the values what this rank has not sent, if it sent compressed messages in an earlier generation and
        does not in this one."""
        unsent = self._compression.unsent(load.step, load.number, load.plan.elements)
        if unsent is not None:
            load.values.add_(unsent)


class SumWithFeedback(CompressedSum):
    """A compressed sum with error feedback: what a rank could not send of a bucket belongs to the state that its last
    step left.

    A rank begins without errors when it copies the state of another, which may have committed a step that failed here:
    this rank's message, with its error, is in that step's sum. It also begins without errors after a step that failed
    behind its reduction: `reduced` has replaced the errors of the step before.
    """

    carries_pair = True
    takes_new_buckets = False  # errors are kept by the bucket's number

    def __init__(
        self,
        operation_queue: OperationQueue,
        feedback: WithFeedback,
        hierarchical: bool,
        engine: StepReductions,
    ) -> None:
        super().__init__(operation_queue, feedback, hierarchical, engine.replica_size)
        self._feedback = feedback
        self._engine = engine
        self._next_step = 0  # after the one this rank committed last; the errors are for it alone
        self._has_reduced = False  # in the step under way

    def launch(
        self, communicator: Communicator | None, bucket: Bucket, number: int, weight: float
    ) -> Pending:
        if number == 0:
            plan = self._engine.plan
            if plan.active_index is None or plan.step != self._next_step:
                self._feedback.forget()
        return super().launch(communicator, bucket, number, weight)

    def discard(self, number: int, elements: Sequence[slice]) -> None:
        self._feedback.discard(number, elements)

    def reduced(self) -> None:
        super().reduced()
        self._has_reduced = True

    def step_committed(self) -> None:
        self._next_step = self._engine.plan.step + 1
        self._has_reduced = False

    def communicator_changed(self) -> None:
        if self._has_reduced:
            self._has_reduced = False
            self._feedback.forget()


class Messages:
    """The messages of one bucket and their memory. gathered: [chunks, bytes of a message], the sums. received, own:
    only on a rank that owns a chunk."""

    def __init__(self, load: Load, compression: Compression, route: Route) -> None:
        chunks = self.chunks = Chunks(load.plan.elements, route.parties)
        self._load = load
        self._compression = compression
        self._size_bytes = size = compression.size_bytes(chunks.size)
        owners = chunks.owners
        message = size + (0 if load.tail is None else _TAIL_BYTES)
        filled = chunks.filled * chunks.size * load.plan.dtype.itemsize
        owned = (owners * size, message) if route.across is not None else (0, 0)
        self._block = load.scratch.take((owners * message, filled, *owned), load.plan.device)
        sums, fill, received, self.own = self._block.parts
        # the sums come to where the contributions lay, which have arrived by then
        self.sent = sums[: owners * size].view(owners, size)
        self.gathered = sums.view(owners, message)
        self.received = received.view(-1, size)
        self._filled = fill.view(load.plan.dtype)

    def compress(self, owner: int) -> Coder:
        load, chunks = self._load, self.chunks
        coder = self._compression.coder(load.step, load.number, chunks, owner, load.plan.device)
        chunks.fill_up(load.values, self._filled)
        for owners, rows in chunks.runs(load.values, self._filled):
            coder.compress(owners, rows, self.sent[owners])
        return coder

    def reduce(self, coder: Coder) -> None:
        coder.reduce(self.received, self.own[: self._size_bytes])
        if self._load.tail is not None:
            tail = self.own[self._size_bytes :]
            tail.zero_()
            tail[:_NUMBERS_BYTES] = self._load.tail.view(torch.uint8)

    def sum_tail(self) -> None:
        if self._load.tail is not None:
            begin = self._size_bytes
            tails = self.gathered[:, begin : begin + _NUMBERS_BYTES].contiguous().view(torch.float32)
            torch.sum(tails, dim=0, out=self._load.tail)

    def decompress(self, sums: torch.Tensor, scale: float = 1.0, add: bool = False) -> None:
        """Decompresses the sums to the bucket's values, or adds them. sums: as `gathered`."""
        load, chunks, size = self._load, self.chunks, self._size_bytes
        if add:
            chunks.fill_up(load.values, self._filled)
        for owners, rows in chunks.runs(load.values, self._filled):
            if load.tail is None:
                self._compression.decompress(sums[owners], rows, scale, add)
                continue
            for message, row in zip(sums[owners], rows, strict=True):
                self._compression.decompress(message[:size], row, scale, add)
        chunks.take_back(self._filled, load.values)

    def nan_flag(self) -> torch.Tensor:
        """Returns whether the sums hold NaN, as a tensor of the host. It may be read once the step is final, without a
        wait."""
        flag = self._compression.nan_flag(self.gathered, self.chunks.size)
        return device_order.order_of([flag]).copy_to_host(flag)

    def give_back(self) -> None:
        self._load.scratch.give_back(self._block)
