"""Computes the loss of a step of the whole job, from the losses of its micro-batches on the workers.

A loss is a mean over the samples of its micro-batch, or a sum that was divided by the items (tokens, most often) of the
whole batch. The first counts by its samples; the second as it is.
"""

from __future__ import annotations

import torch

import bagua_core as bagua
from bagua_core.elastic.step import runtime


class StepLoss:
    def __init__(self) -> None:
        self._is_over_items = False
        self._sums: torch.Tensor | None = None
        self._flops = 0.0

    def begin(self, *, is_over_items: bool) -> None:
        """Begins a step. is_over_items: its losses were divided by the items of the whole batch."""
        self._is_over_items = is_over_items
        self._sums = None

    def note_flops(self, flops: float) -> None:
        """Notes the floating-point operations of the micro-batch whose backward comes next."""
        self._flops = flops

    def before_backward(self, loss: torch.Tensor) -> torch.Tensor:
        """Counts `loss`, and returns it as its backward must see it. With the last micro-batch the sums become the
        job's: by a collective of the step, before its last backward, so that a worker lost in it fails the step."""
        micro_batch = runtime.engine().micro_batch
        own = loss.detach().double()
        own = torch.stack(
            [own if self._is_over_items else own * micro_batch.weight, own.new_tensor(self._flops)]
        )
        if micro_batch.weight == 0.0:
            own = torch.zeros_like(own)  # a filler: it has no part in the job's step
        self._sums = own if self._sums is None else self._sums + own
        if micro_batch.last:
            self._sums = bagua.allreduce(self._sums)
        return bagua.scale_loss(loss) if self._is_over_items else loss

    @property
    def loss(self) -> torch.Tensor:
        """The job's loss, once the step's last micro-batch has been through its backward; and so are the flops."""
        assert self._sums is not None
        return self._sums[0]

    @property
    def flops(self) -> torch.Tensor:
        assert self._sums is not None
        return self._sums[1]
