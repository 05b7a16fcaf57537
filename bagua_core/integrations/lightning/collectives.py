"""Lightning's collectives as the job's own: they leave out joiners before their first step, and survive a loss between
steps. Metrics of torchmetrics are synchronised by them too.
"""

from __future__ import annotations

from collections.abc import Callable
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


def connect_metrics(module: torch.nn.Module, place: Callable[[], tuple[int, int]]) -> None:
    """Have the torchmetrics in `module` synchronise by the job's collectives: torch.distributed has no group here.

    place(): rank and world size in the evaluation under way."""
    for part in module.modules():
        if isinstance(part, Metric):
            part.dist_sync_fn = gather_unequal
            part.distributed_available_fn = _HasPeers(place)


class _HasPeers:
    """Whether other workers are in the evaluation under way. Of a pickled metric, which is in no trainer: none."""

    def __init__(self, place: Callable[[], tuple[int, int]] = lambda: (0, 1)) -> None:
        self._place = place

    def __call__(self) -> bool:
        return self._place()[1] > 1

    def __deepcopy__(self, memory: object) -> _HasPeers:
        return self

    def __reduce__(self) -> tuple[type[_HasPeers], tuple[()]]:
        return _HasPeers, ()
