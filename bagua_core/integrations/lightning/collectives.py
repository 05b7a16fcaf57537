"""Implements Lightning's collectives by the job's own: they leave out joiners in their first step and values of
fillers, and survive a loss between steps. Metrics of torchmetrics are synchronised by them too.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torchmetrics import Metric

import bagua_core as bagua
from bagua_core.elastic.step import runtime
from bagua_core.elastic.waiting.operations import neutral
from bagua_core.integrations.loader_settings import UnsupportedInElasticJob
from bagua_core.integrations.worker_values import gather_unequal, mean

_OPERATIONS = {
    "sum": bagua.ReduceOp.SUM,
    "min": bagua.ReduceOp.MIN,
    "max": bagua.ReduceOp.MAX,
    "product": bagua.ReduceOp.PRODUCT,
}


def reduce(tensor: torch.Tensor, operation: Any) -> torch.Tensor:
    """Reduces the values of workers that have the job's state and samples of the step.

    operation: a name, or an operation of torch.distributed.
    """
    name = str(getattr(operation, "name", operation)).lower().rsplit(".", 1)[-1]
    if name in ("mean", "avg"):
        return mean(tensor, is_filler=runtime.engine().has_fillers)
    if name not in _OPERATIONS:
        raise UnsupportedInElasticJob(
            f"reduce_op={operation!r} is none of mean, {', '.join(_OPERATIONS)}, which strategy='bagua' has"
        )
    op = _OPERATIONS[name]
    return bagua.allreduce(neutral(tensor, op) if runtime.engine().has_fillers else tensor, op)


def decided(decision: bool, all_agree: bool, device: torch.device) -> bool:
    """Returns whether all workers decide so, or any of them. Decisions are no values of samples: a worker with fillers
    counts too."""
    op = bagua.ReduceOp.MIN if all_agree else bagua.ReduceOp.MAX
    return bool(bagua.allreduce(torch.tensor(int(decision), dtype=torch.int64, device=device), op))


def gather_state(metric: Metric, state: torch.Tensor, group: Any = None) -> list[torch.Tensor]:
    """Gathers a metric's state: its dist_sync_fn. Its forward synchronises the state of the step's batch alone, whose
    samples may be fillers; what it computes from all batches so far counts in any step."""
    is_of_batch = not metric._should_unsync
    return gather_unequal(state, is_filler=is_of_batch and runtime.engine().has_fillers)


def connect_metrics(module: torch.nn.Module, place: Callable[[], tuple[int, int]]) -> None:
    """Connects the torchmetrics in `module` to the job's collectives: torch.distributed has no group here.

    place(): rank and world size in the evaluation under way."""
    for part in module.modules():
        if isinstance(part, Metric):
            part.dist_sync_fn = partial(gather_state, part)
            part.distributed_available_fn = _HasPeers(place)


class _HasPeers:
    """Tells, when called, whether other workers are in the current evaluation. For a pickled metric, which is in no
    trainer, none are."""

    def __init__(self, place: Callable[[], tuple[int, int]] = lambda: (0, 1)) -> None:
        self._place = place

    def __call__(self) -> bool:
        return self._place()[1] > 1

    def __deepcopy__(self, memory: object) -> _HasPeers:
        return self

    def __reduce__(self) -> tuple[type[_HasPeers], tuple[()]]:
        return _HasPeers, ()
