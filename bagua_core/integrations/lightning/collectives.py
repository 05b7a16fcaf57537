"""Lightning's collectives as the job's own: they leave out joiners before their first step, and survive a loss between
steps. Metrics of torchmetrics are synchronised by them too.
"""

from __future__ import annotations

from typing import Any

import torch
from torchmetrics import Metric

import bagua_core as bagua
from bagua_core.integrations.lightning.train_batches import UnsupportedInElasticJob

_OPERATIONS = {
    "sum": bagua.ReduceOp.SUM,
    "min": bagua.ReduceOp.MIN,
    "max": bagua.ReduceOp.MAX,
    "product": bagua.ReduceOp.PRODUCT,
}


def reduce(tensor: torch.Tensor, operation: Any) -> torch.Tensor:
    """operation: a name, or an operation of torch.distributed. Means are of the workers that have the job's state."""
    name = str(getattr(operation, "name", operation)).lower().rsplit(".", 1)[-1]
    if name in ("mean", "avg"):
        values = tensor if tensor.is_floating_point() else tensor.float()
        summed = bagua.allreduce(torch.cat([values.flatten(), values.new_ones(1)]))
        return (summed[:-1] / summed[-1].clamp(min=1)).reshape(tensor.shape)
    if name not in _OPERATIONS:
        raise UnsupportedInElasticJob(
            f"reduce_op={operation!r} is none of mean, {', '.join(_OPERATIONS)}, which strategy='bagua' has"
        )
    return bagua.allreduce(tensor, _OPERATIONS[name])


def gather_unequal(tensor: torch.Tensor, group: Any = None) -> list[torch.Tensor]:
    """Every worker's tensor, by rank. Their shapes may differ in size, not in the number of dimensions."""
    flat = tensor.reshape(1) if tensor.dim() == 0 else tensor
    shapes = bagua.allgather(torch.tensor(flat.shape, dtype=torch.int64))
    longest = int(shapes.prod(1).max())
    padded = flat.new_zeros(longest)
    padded[: flat.numel()] = flat.flatten()
    rows = bagua.allgather(padded)
    parts = [
        row[: int(shape.prod())].reshape(shape.tolist()) for row, shape in zip(rows, shapes, strict=True)
    ]
    return [part.reshape(()) for part in parts] if tensor.dim() == 0 else parts


def connect_metrics(module: torch.nn.Module) -> None:
    """Have the torchmetrics in `module` synchronise by the job's collectives: torch.distributed has no group here."""
    for part in module.modules():
        if isinstance(part, Metric):
            part.dist_sync_fn = gather_unequal
            part.distributed_available_fn = _has_peers


def _has_peers() -> bool:
    return bagua.get_world_size() > 1
