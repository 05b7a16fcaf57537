"""Exchanges what the shards' forwards did to a model's buffers, and applies it in shard order.

One message a step for a model with buffers: each rank's rows of statistics, and whether another buffer changed. Only
if one did on any rank, all of that kind are sent by the rank that owns shard 0.
"""

from __future__ import annotations

import torch

from bagua_core.communication.communicator import Communicator, Pending
from bagua_core.communication.reduction.buffer_broadcast import broadcast_buffers
from bagua_core.communication.reduction.operation_queue import Job, OperationQueue
from bagua_core.communication.shards.shard_tree import leaves_of
from bagua_core.communication.step_interface import StepPlan, StepReductions
from bagua_core.model.shard_buffers import ShardBuffers


class BufferRows:
    """The exchange of one model's buffer rows."""

    def __init__(
        self, buffers: ShardBuffers, operation_queue: OperationQueue, engine: StepReductions
    ) -> None:
        self._buffers = buffers
        self._operations = operation_queue
        self._engine = engine
        self._pending: Pending | None = None
        self._arriving: torch.Tensor | None = None  # [ranks, most shards of a rank, row and flag]
        self._rows: list[torch.Tensor] = []  # of all shards, in order

    def launch(self, communicator: Communicator | None) -> None:
        """Sends this rank's rows once its last shard has been computed. Called before the first bucket of the step is
        launched."""
        own = self._buffers.rows()
        if self._buffers.is_empty:
            return
        if communicator is None:
            self._rows = own
            return
        plan, shards = self._engine.plan, self._engine.micro_batch.shards
        length = self._buffers.row_length
        most = len(leaves_of(shards, plan.active_count, 0))
        sent = torch.zeros(most, length + 1, dtype=torch.float64, device=self._buffers.device)
        for place, row in enumerate(own):
            sent[place, :length] = row
        sent[:, length] = float(self._buffers.has_changed)
        self._arriving = sent.new_zeros(plan.world_size, most, length + 1)
        job = _gather(communicator, self._arriving, sent)
        self._pending = self._operations.launch(communicator, job, (sent, self._arriving))

    def arrive(self, communicator: Communicator) -> None:
        """Waits for the rows of all shards, and for other buffers if one of them changed. All buckets have arrived
        before. Raises CollectiveFailed."""
        pending, arriving = self._pending, self._arriving
        if pending is None or arriving is None:
            return
        self._engine.wait(pending)
        plan, shards = self._engine.plan, self._engine.micro_batch.shards
        self._rows = [
            arriving[rank, place, :-1]
            for rank, count in enumerate(shards_by_rank(plan, shards))
            for place in range(count)
        ]
        if bool(arriving[:, :, -1].any()):
            owner = min(set(range(plan.world_size)) - plan.healing)
            others = self._buffers.others(of_first=plan.global_rank == owner)
            broadcast_buffers(others, communicator, self._engine.wait, source=owner)

    def apply(self) -> None:
        """Applies the rows to the buffers: the step is final."""
        if self._pending is None and self._buffers.has_changed:
            self._buffers.others(of_first=True)  # a world of one
        self._buffers.apply_statistics(self._rows)
        self.forget()

    def forget(self) -> None:
        self._pending = self._arriving = None
        self._rows = []
        self._buffers.forget()


def shards_by_rank(plan: StepPlan, shards: int) -> list[int]:
    """Returns how many shards each rank owns."""
    counts, index = [], 0
    for rank in range(plan.world_size):
        if rank in plan.healing:
            counts.append(0)
            continue
        counts.append(len(leaves_of(shards, plan.active_count, index)))
        index += 1
    return counts


def _gather(communicator: Communicator, rows: torch.Tensor, own: torch.Tensor) -> Job:
    yield communicator.allgather(rows, own)
