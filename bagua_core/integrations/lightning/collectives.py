"""Lightning's collectives as the job's own: they leave out joiners before their first step, and survive a loss between
steps. Metrics of torchmetrics are synchronised by them too.
"""

from __future__ import annotations

from typing import Any

import torch
from torchmetrics import Metric

import bagua_core as bagua
from bagua_core.integrations.loader_settings import UnsupportedInElasticJob
from bagua_core.integrations.worker_values import gather_unequal, mean

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
        return mean(tensor)
    if name not in _OPERATIONS:
        raise UnsupportedInElasticJob(
            f"reduce_op={operation!r} is none of mean, {', '.join(_OPERATIONS)}, which strategy='bagua' has"
        )
    return bagua.allreduce(tensor, _OPERATIONS[name])


def connect_metrics(module: torch.nn.Module) -> None:
    """Have the torchmetrics in `module` synchronise by the job's collectives: torch.distributed has no group here."""
    for part in module.modules():
        if isinstance(part, Metric):
            part.dist_sync_fn = gather_unequal
            part.distributed_available_fn = _has_peers


def _has_peers() -> bool:
    return bagua.get_world_size() > 1
