"""Sums a bucket over all ranks in the order of the tree over shards, so that every world gets the same bits.

A rank brings the sums of its cover (shard_tree.py). Small buckets go whole to all ranks, which add them alike. Of
others each rank gets one chunk of all covers, adds it, and sends the sum to all. No collective that adds is used,
because its order of additions depends on the world. The numbers behind the last bucket's gradients are whole and small,
so that their sum is exact in any order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from bagua_core.communication.communicator import Communicator, Pending
from bagua_core.communication.compressed.scratch import Block, Scratch
from bagua_core.communication.pending import DonePending
from bagua_core.communication.reduction.bucket_buffer import Bucket
from bagua_core.communication.reduction.bucket_operation import BucketOperation
from bagua_core.communication.reduction.operation_queue import Job, OperationQueue
from bagua_core.communication.shards.partial_sums import PartialSum, PartialSums
from bagua_core.communication.shards.shard_tree import Node, cover, leaves_of, merges
from bagua_core.communication.step_interface import MicroBatch, StepPlan, StepReductions
from bagua_core.errors import NotDeterministicError

SMALL_BYTES = 64 * 1024
"""Of all that one rank sends; up to here one message takes less time than two."""


@dataclass(frozen=True, slots=True)
class Covers:
    """The nodes that each rank brings, by global rank; none of a rank without a share."""

    shards: int
    nodes: tuple[tuple[Node, ...], ...]

    @property
    def all_nodes(self) -> list[Node]:
        """The nodes in order of their leaves, which is that of the ranks."""
        return [node for nodes in self.nodes for node in nodes]

    @property
    def counts(self) -> list[int]:
        return [len(nodes) for nodes in self.nodes]


def covers_of(plan: StepPlan, shards: int) -> Covers:
    """Returns the nodes that each rank of `plan` brings in a step with so many shards."""
    nodes: list[tuple[Node, ...]] = []
    index = 0
    for global_rank in range(plan.world_size):
        if global_rank in plan.healing:
            nodes.append(())
            continue
        nodes.append(tuple(cover(leaves_of(shards, plan.active_count, index), shards)))
        index += 1
    return Covers(shards, tuple(nodes))


def goes_whole(covers: Covers, size_bytes: int) -> bool:
    """Tells whether each rank sends all its sums to all others, which is one message, instead of chunks, which are two.
    size_bytes: of a bucket."""
    world_size, most = len(covers.nodes), max(covers.counts)
    whole = (world_size - 1) * most * size_bytes
    in_chunks = (world_size - 1) * (most + 1) * size_bytes / world_size
    return whole <= max(in_chunks, SMALL_BYTES)


class TreeSum(BucketOperation):
    carries_pair = True
    acts_alone = True  # a world of one adds in the same order

    def __init__(self, operation_queue: OperationQueue, engine: StepReductions) -> None:
        self._operations = operation_queue
        self._engine = engine
        self._sums = PartialSums()
        self._scratch = Scratch()
        self._covers: tuple[StepPlan, Covers] | None = None

    def keep(self, bucket: Bucket, number: int, micro_batch: MicroBatch) -> None:
        """Adds the bucket, which is full with the leaf of a shard that is not this rank's last. The bucket may be
        filled anew."""
        assert micro_batch.shard is not None
        values = bucket.flat[: bucket.plan.elements]
        self._sums.add(number, micro_batch.shard, micro_batch.shards, values)

    def launch(
        self, communicator: Communicator | None, bucket: Bucket, number: int, weight: float
    ) -> Pending:
        """Begins the sum of a bucket; see BucketOperation. Raises NotDeterministicError if a shard of this rank is
        missing."""
        micro_batch = self._engine.micro_batch
        covers = self._covers_of(micro_batch.shards)
        values = bucket.flat[: bucket.plan.elements]
        sums: list[PartialSum] = []
        if micro_batch.shard is not None:
            sums = self._sums.add_last(number, micro_batch.shard, micro_batch.shards, values)
        rank = self._engine.plan.global_rank
        if tuple(each.node for each in sums) != covers.nodes[rank]:
            raise NotDeterministicError(
                "a shard of this step had no backward of this model, so its gradient is missing; in a "
                "deterministic job every batch that the loader gives must be trained on"
            )
        if communicator is None:
            return DonePending()
        tensors = (bucket.flat, *(each.values for each in sums))
        job = self._exchange(communicator, covers, number, sums, bucket.flat, bucket.plan.elements)
        return self._operations.launch(communicator, job, tensors)

    def failed(self) -> None:
        self._operations.flush()
        self._sums.renew()
        self._scratch = Scratch()

    def forget(self) -> None:
        """Drops the sums of the step under way, which did not happen."""
        self._sums.drop()

    def communicator_changed(self) -> None:
        self._sums.renew()
        self._covers = None

    def _covers_of(self, shards: int) -> Covers:
        plan = self._engine.plan
        known = self._covers
        if known is None or known[0] != plan or known[1].shards != shards:
            known = self._covers = plan, covers_of(plan, shards)
        return known[1]

    # -- in the operation queue's thread

    def _exchange(
        self,
        communicator: Communicator,
        covers: Covers,
        number: int,
        sums: list[PartialSum],
        flat: torch.Tensor,
        elements: int,
    ) -> Job:
        """Sums the bucket over all ranks. flat: [elements and tail], which gets the sum."""
        if goes_whole(covers, flat.nbytes):
            yield from self._whole(communicator, covers, sums, flat, elements)
        else:
            yield from self._in_chunks(communicator, covers, sums, flat, elements)
        self._sums.give_back(number, sums)

    def _whole(
        self,
        communicator: Communicator,
        covers: Covers,
        sums: list[PartialSum],
        flat: torch.Tensor,
        elements: int,
    ) -> Job:
        """Sends all nodes of all ranks to every rank, each rank's tail behind them, and adds them there."""
        world_size, most = communicator.world_size, max(covers.counts)
        length = most * elements + flat.numel() - elements
        block, (received, message) = self._take(flat, world_size * length, length if most > 1 else 0)
        if most > 1:
            for row, each in enumerate(sums):
                message[row * elements : (row + 1) * elements] = each.values
            message[most * elements :] = flat[elements:]
        else:
            message = flat  # its one sum, or zeros without a share, and the tail: no copy
        rows = received.view(world_size, length)
        yield communicator.allgather(rows, message)
        parts = [
            rows[rank, place * elements : (place + 1) * elements]
            for rank, count in enumerate(covers.counts)
            for place in range(count)
        ]
        _add(parts, covers, flat[:elements])
        if flat.numel() > elements:
            torch.sum(rows[:, most * elements :], dim=0, out=flat[elements:])
        self._scratch.give_back(block)

    def _in_chunks(
        self,
        communicator: Communicator,
        covers: Covers,
        sums: list[PartialSum],
        flat: torch.Tensor,
        elements: int,
    ) -> Job:
        """Sends one chunk of all sums to each rank, which adds it, and gathers the added chunks on every rank."""
        world_size, counts = communicator.world_size, covers.counts
        own, total = len(sums), sum(counts)
        chunk = -(-elements // world_size)
        tail = flat.numel() - elements
        sizes = (world_size * own * chunk, total * chunk, chunk + tail, world_size * (chunk + tail))
        block, (sent, received, message, gathered) = self._take(flat, *sizes)
        by_owner = sent.view(world_size, own, chunk)
        for place, each in enumerate(sums):
            _cut(each.values, by_owner[:, place])
        if len(set(counts)) == 1:
            arriving, going = received.view(world_size, own * chunk), sent.view(world_size, own * chunk)
            yield communicator.alltoall(arriving, going)
        else:
            arriving, going = received.view(total, chunk), sent.view(world_size * own, chunk)
            yield communicator.alltoall_v(arriving, going, counts, [own] * world_size)
        _add(list(received.view(total, chunk)), covers, message[:chunk])
        message[chunk:] = flat[elements:]
        rows = gathered.view(world_size, chunk + tail)
        yield communicator.allgather(rows, message)
        _join(rows[:, :chunk], flat[:elements])
        if tail:
            torch.sum(rows[:, chunk:], dim=0, out=flat[elements:])
        self._scratch.give_back(block)

    def _take(self, like: torch.Tensor, *elements: int) -> tuple[Block, list[torch.Tensor]]:
        """Returns memory for messages, in like's dtype and on its device."""
        width = like.dtype.itemsize
        block = self._scratch.take([count * width for count in elements], like.device)
        return block, [part.view(like.dtype) for part in block.parts]


def _add(parts: Sequence[torch.Tensor], covers: Covers, into: torch.Tensor) -> None:
    """Writes the root's sum. parts: of all nodes, in order of their leaves; they are changed."""
    plan = merges(covers.all_nodes, covers.shards)
    for merge in plan[:-1]:
        parts[merge.left].add_(parts[merge.right])
    if plan:
        torch.add(parts[plan[-1].left], parts[plan[-1].right], out=into)
    else:
        into.copy_(parts[0])


def _cut(values: torch.Tensor, chunks: torch.Tensor) -> None:
    """Writes the values into `chunks` in order. chunks: [owners, size]; what is left of the last ones is zero."""
    size = chunks.shape[1]
    whole, rest = divmod(values.numel(), size)
    chunks[:whole] = values[: whole * size].view(whole, size)
    if whole < len(chunks):
        chunks[whole:] = 0
        chunks[whole, :rest] = values[whole * size :]


def _join(chunks: torch.Tensor, values: torch.Tensor) -> None:
    """Writes the chunks into `values`: the inverse of _cut."""
    size = chunks.shape[1]
    whole, rest = divmod(values.numel(), size)
    values[: whole * size].view(whole, size).copy_(chunks[:whole])
    if rest:
        values[whole * size :] = chunks[whole, :rest]
