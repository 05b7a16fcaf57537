"""Combines the parts of all ranks: the arithmetic of every reduction that a transport does not do itself.

Pure. Invariant: parts are taken in rank order, so all ranks with the same parts get the same bits. Half precision is
added in float32 and rounded once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from bagua_core.communication.communicator import ReduceOp
from bagua_core.communication.reducible import carrier_of, sums_in

_INTO: dict[ReduceOp, Callable[[torch.Tensor, torch.Tensor], object]] = {
    ReduceOp.SUM: lambda total, part: total.add_(part),
    ReduceOp.AVG: lambda total, part: total.add_(part),
    ReduceOp.PRODUCT: lambda total, part: total.mul_(part),
    ReduceOp.MIN: lambda total, part: torch.minimum(total, part, out=total),
    ReduceOp.MAX: lambda total, part: torch.maximum(total, part, out=total),
    ReduceOp.BOR: lambda total, part: total.bitwise_or_(part),
    ReduceOp.BAND: lambda total, part: total.bitwise_and_(part),
    ReduceOp.BXOR: lambda total, part: total.bitwise_xor_(part),
}


def reduce_parts(parts: Sequence[torch.Tensor], op: ReduceOp, output: torch.Tensor) -> None:
    """Writes the reduction `op` of `parts` into `output`.

    parts: in rank order, contiguous, each in output's shape and dtype; `output` shares no memory with any of them.
    Raises TypeError if `op` is not defined for the type.
    """
    carriers = [carrier_of(part, op) for part in parts]
    target = carrier_of(output, op)
    dtype = sums_in(target.tensor.dtype, op)
    first = carriers[0].tensor
    total = target.tensor.copy_(first) if target.tensor.dtype is dtype else first.to(dtype)
    for carrier in carriers[1:]:
        _INTO[target.op](total, carrier.tensor)
    if op is ReduceOp.AVG:
        divide(total, len(parts))
    if total is not target.tensor:
        target.tensor.copy_(total)
    if target.bring_back is not None:
        target.bring_back()


def divide(total: torch.Tensor, count: int) -> None:
    """Divides a sum by `count` in place, which gives the mean. Whole numbers are rounded towards zero."""
    if total.is_floating_point() or total.is_complex():
        total.div_(count)
    else:
        total.div_(count, rounding_mode="trunc")
