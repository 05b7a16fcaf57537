"""Prepares torch for a joiner's first optimizer step on sharded parameters, before the job waits for it.

torch decides once for each operation and layout how DTensors take part in it, and remembers the decision. The decisions
of an optimizer's first step take 0.17 s of a processor for a model of four small blocks, a tenth of which its later
steps take: all replicas would wait for it. A rehearsal steps an optimizer of the same class and options on tensors
without memory (device "meta"), one for each layout. It touches nothing of the script's and communicates with no worker.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch

from bagua_core.model.sharded_tensors import is_sharded, local, sharded_as

REHEARSED = frozenset(
    {"Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "Muon", "NAdam", "RAdam", "RMSprop", "SGD"}
)
"""Of torch.optim, by class. On tensors without memory also the collectives of Muon's step move nothing."""

NOT_REHEARSED = {
    "ASGD": "its step reads values, which tensors without memory do not have",
    "Adafactor": "torch cannot take its step on sharded parameters",
    "LBFGS": "its step calls the script's closure",
    "Rprop": "torch cannot take its step on sharded parameters",
    "SparseAdam": "it takes sparse gradients, which shards do not have",
}
"""The other optimizers of torch.optim, with the reason."""


class Rehearsed(NamedTuple):
    """The result of a rehearsal. layouts: of the stand-ins that were stepped. failed: why an optimizer's rehearsal
    ended early, which leaves the rest of the decisions to its first step."""

    layouts: int
    failed: tuple[str, ...]


def rehearse(optimizers: Iterable[torch.optim.Optimizer]) -> Rehearsed:
    """Takes a step of each optimizer of torch that can be rehearsed on stand-ins of its sharded parameters.

    Groups with `fused` or `capturable` are left out, for tensors without memory have no such operations.
    """
    count, failed = 0, []
    for optimizer in optimizers:
        kind = type(optimizer)
        if kind.__name__ not in REHEARSED or kind is not getattr(torch.optim, kind.__name__, None):
            continue
        groups = [{**_options(group), "params": _stand_ins(group["params"])} for group in _able(optimizer)]
        groups = [group for group in groups if group["params"]]
        if not groups:
            continue
        block_optimizer = kind(groups)
        # without the hooks that a script may have registered for all optimizers
        step = getattr(kind.step, "__wrapped__", kind.step)
        try:
            step(block_optimizer)
        except RuntimeError as error:  # torch reads a value with these options; that must not end the joiner
            failed.append(f"{kind.__name__}: {str(error).partition(chr(10))[0]}")
            continue
        count += sum(len(group["params"]) for group in groups)
    return Rehearsed(count, tuple(failed))


def _able(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    return [g for g in optimizer.param_groups if not g.get("fused") and not g.get("capturable")]


def _options(group: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name not in ("params", "param_names")}


def _stand_ins(parameters: Iterable[torch.Tensor]) -> list[torch.nn.Parameter]:
    """Returns one stand-in for each layout, with a gradient."""
    found: dict[Any, torch.nn.Parameter] = {}
    for parameter in parameters:
        if not is_sharded(parameter) or not parameter.requires_grad:
            continue
        shape = local(parameter).shape
        mesh, placements = parameter.device_mesh, parameter.placements  # type: ignore[attr-defined]
        layout = (parameter.shape, parameter.stride(), parameter.dtype, mesh, placements, shape)
        if layout not in found:
            found[layout] = torch.nn.Parameter(_without_memory(parameter))
            found[layout].grad = _without_memory(parameter)
    return list(found.values())


def _without_memory(parameter: torch.Tensor) -> torch.Tensor:
    return sharded_as(parameter, torch.empty_like(local(parameter), device="meta"))
