"""Reduces a model's gradients shard by shard: the reducer of deterministic jobs.

Each backward but the last of a worker adds its shard's gradient to the partial sums (partial_sums.py); the last one
launches the buckets. Buffers that the shards' forwards change travel beside them. States, invariants and failure cases:
docs/design/deterministic.md. Invariant: the gradient of a shard is computed from none, so that no zero is added to it
that other worlds do not add.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from bagua_core.communication.communicator import Communicator
from bagua_core.communication.reduction.operation_queue import OperationQueue
from bagua_core.communication.reduction.reducer import Reducer
from bagua_core.communication.shards.buffer_rows import BufferRows
from bagua_core.communication.shards.tree_sum import TreeSum
from bagua_core.communication.step_interface import MicroBatch, StepReductions
from bagua_core.errors import NotDeterministicError
from bagua_core.model.shard_buffers import ShardBuffers


class _TreeSum(TreeSum):
    """A tree sum that votes once the buffers have arrived too, and changes them when the step is final."""

    def __init__(self, operation_queue: OperationQueue, engine: StepReductions, rows: BufferRows) -> None:
        super().__init__(operation_queue, engine)
        self.rows = rows

    def before_vote(self, communicator: Communicator) -> None:
        self.rows.arrive(communicator)

    def reduced(self) -> None:
        self.rows.apply()

    def failed(self) -> None:
        super().failed()
        self.rows.forget()


class ShardReducer(Reducer):
    """The reducer of deterministic jobs; see Reducer. buffers: of the model whose parameters these are."""

    def __init__(
        self,
        parameters: Iterable[torch.nn.Parameter],
        engine: StepReductions,
        bucket_cap_bytes: int,
        find_unused_parameters: bool,
        operation_queue: OperationQueue,
        buffers: ShardBuffers,
    ) -> None:
        self._buffers = buffers
        self._rows = BufferRows(buffers, operation_queue, engine)
        self._tree = _TreeSum(operation_queue, engine, self._rows)
        self._of_shard: MicroBatch | None = None  # whose backward came last
        self._is_later = False  # this worker has computed another shard of the step
        super().__init__(
            parameters,
            engine,
            bucket_cap_bytes,
            operation=self._tree,
            find_unused_parameters=find_unused_parameters,
        )
        self._used_before = bytearray(len(self._parameters))  # by earlier shards of the step
        self._separate_mean()

    def forward_begins(self) -> None:
        self._buffers.forward_begins(self._engine.micro_batch)

    def check_shards(self) -> None:
        """See Exchange. Sums that no last shard completes would be dropped here, and not by workers with one shard."""
        if self._is_later and self._of_shard is not None:
            raise NotDeterministicError(
                f"this worker's last shard of the step had no backward of the model: the last one was of shard "
                f"{self._of_shard.shard} of {self._of_shard.shards}. In a deterministic job every batch that the "
                "loader gives must be trained on; leave the loop only where loader.is_at_step_end"
            )

    def step_committed(self) -> None:
        super().step_committed()
        self._forget_step()  # a step in which no backward of this model ran

    def communicator_changed(self) -> None:
        super().communicator_changed()
        self._forget_step()

    def close(self) -> None:
        super().close()
        self._buffers.close()

    # -- during backward

    def _backward_begins(self) -> None:
        micro_batch = self._micro_batch
        if self._skips:
            return
        if micro_batch is self._of_shard:
            raise NotDeterministicError(
                "a second backward of one model in one batch of the loader: a deterministic job sums the gradients of "
                "each shard once; add the losses up and call backward() once"
            )
        self._of_shard = micro_batch
        self._buffers.shard_computed(micro_batch)
        for index, parameter in enumerate(self._parameters):
            if parameter.grad is not None:
                self._set_mean_aside(index, parameter)
        if micro_batch.last and not self._turn.is_due:
            self._rows.launch(self._communicator)

    def _turn_is_taken(self) -> None:
        self._rows.launch(self._communicator)

    def _before_accumulation(self, parameter: torch.nn.Parameter) -> Callable[[torch.Tensor], None]:
        """Returns a hook by which the first gradient of a backward sets aside what all parameters hold: a call for each
        of them, in each shard, would cost more than the sums."""
        backward, index_of, identity = self._backward, self._index_of, id(parameter)

        def gradient_computed(_: torch.Tensor) -> None:
            if backward.is_new() and self.synced and identity in index_of:
                with self._lock:
                    self._enter_backward()

        return gradient_computed

    def _accumulated_in(self, parameter: torch.Tensor) -> None:
        if self._micro_batch.last or self._backward.is_new():
            super()._accumulated_in(parameter)

    def _set_mean_aside(self, index: int, parameter: torch.nn.Parameter) -> None:
        """Puts a mean that the script left in .grad into the leaf of shard 0, unweighted. What earlier shards of the
        step left there is zero."""
        if parameter.grad is self._views[index]:
            parameter.grad = None
            self._accumulated[index] = 1 if self._micro_batch.shard == 0 else 0
        elif self._is_later:
            parameter.grad = None

    # -- the end of backward

    def _complete(self) -> None:
        if self._micro_batch.last:
            super()._complete()
            self._begin_step()
            return
        self._contribute_all()
        for number, bucket in enumerate(self._buckets):
            self._tree.keep(bucket, number, self._micro_batch)
        self._accumulated = bytearray(len(self._parameters))
        self._has_parts = True
        self._is_later = True

    def _contribute_all(self) -> None:
        """Puts weight * .grad of all parameters into their buckets, and makes .grad zero."""
        gradients, weight = [], self._micro_batch.weight
        for index, parameter in enumerate(self._parameters):
            gradient = parameter.grad
            if gradient is not None:
                self._used_before[index] = 1
            if gradient is None or self._accumulated[index] or gradient.layout is not torch.strided:
                self._contribute(index, parameter)
            else:
                torch.mul(gradient, weight, out=self._views[index])
                gradients.append(gradient)
        if gradients:
            torch._foreach_zero_(gradients)

    def _note_used(self) -> None:
        super()._note_used()
        self._used.logical_or_(torch.tensor(list(self._used_before), dtype=torch.bool, device="cpu"))

    def _begin_step(self) -> None:
        self._is_later = False
        self._used_before = bytearray(len(self._parameters))

    def _forget(self) -> None:
        super()._forget()
        self._forget_step()

    def _forget_step(self) -> None:
        self._tree.forget()
        self._rows.forget()
        self._begin_step()
        self._of_shard = None
