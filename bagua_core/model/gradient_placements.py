"""Gives the gradient of a sharded parameter the placements of the parameter.

torch leaves a gradient as the backward has computed it. The gradient of a replicated weight is Partial if each worker
of the replica used the weight for samples or positions of its own, as SequenceParallel does: the gradient is then the
sum over these workers, and the local tensor is one term of it. Code that reads local tensors needs the sum.
"""

from __future__ import annotations

from typing import Any

import torch

from bagua_core.model.sharded_tensors import is_sharded


def place_gradient(parameter: torch.Tensor) -> None:
    """Redistributes .grad if its placements differ from those of `parameter`. All workers of the parameter's mesh must
    call it at the same place: it communicates among them."""
    gradient: Any = parameter.grad
    if not is_sharded(gradient) or not is_sharded(parameter):
        return
    placements = parameter.placements  # type: ignore[attr-defined]
    if gradient.placements != placements:
        with torch.no_grad():
            parameter.grad = gradient.redistribute(placements=placements)
