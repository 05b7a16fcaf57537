"""Scales a loss that is a sum over samples, so that the job's gradient is that of the sum over the global batch.

The reducer adds weight times gradient over all ranks and micro-batches. The weight of a micro-batch is its samples over
those of the global batch, which is right for a mean: (n / N) * (1 / n) per sample makes 1 / N. A sum over samples must
count with 1 instead, so its loss is divided by the weight. Where the workers of a replica divide its samples, the
weight is the replica's, and each worker's own fraction of it is a second factor.
"""

from __future__ import annotations

import torch

from bagua_core.communication.step_interface import MicroBatch
from bagua_core.elastic.step import runtime


def scale_loss(loss: torch.Tensor) -> torch.Tensor:
    """Returns `loss`, a sum over this worker's samples (times or divided by a constant), as backward() must see it.

    Call it after the forward. After backward() the gradient is that of the sum over the samples of all workers, for any
    shares and micro-batches. For losses that are means over samples call backward() on the loss itself.
    """
    return scaled(loss, runtime.engine().micro_batch)


def scaled(loss: torch.Tensor, micro_batch: MicroBatch) -> torch.Tensor:
    """Returns what scale_loss returns, for a given micro-batch."""
    # within a replica the gradients of means are averaged by samples too
    weight = micro_batch.weight * micro_batch.own
    # without a share the gradient is replaced by zero, and the loss may be one of filler samples
    return loss if weight == 0.0 else loss / weight
