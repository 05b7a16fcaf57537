"""Chooses the type in which a tensor is reduced. Transports add few types; the others travel as one of those.

Pure. A carrier is the same memory under another type where that gives the right bits, else a wider copy. Whole numbers
wrap around as their own type does. Raises TypeError where the operation means nothing for the type.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from bagua_core.communication.communicator import ReduceOp

NATIVE = frozenset(
    {
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
        torch.int8,
        torch.uint8,
        torch.int32,
        torch.int64,
    }
)
"""What every transport reduces itself."""

BITWISE = frozenset({ReduceOp.BOR, ReduceOp.BAND, ReduceOp.BXOR})
_ADDING = frozenset({ReduceOp.SUM, ReduceOp.AVG})
_OF_BOOLEANS = {
    ReduceOp.SUM: ReduceOp.MAX,
    ReduceOp.MAX: ReduceOp.MAX,
    ReduceOp.BOR: ReduceOp.MAX,
    ReduceOp.PRODUCT: ReduceOp.MIN,
    ReduceOp.MIN: ReduceOp.MIN,
    ReduceOp.BAND: ReduceOp.MIN,
    ReduceOp.BXOR: ReduceOp.BXOR,
}
_WIDER = {
    torch.int16: torch.int32,
    torch.uint16: torch.int32,
    torch.uint32: torch.int64,
    torch.float8_e4m3fn: torch.float32,
    torch.float8_e5m2: torch.float32,
    torch.float8_e4m3fnuz: torch.float32,
    torch.float8_e5m2fnuz: torch.float32,
}
_SIGNED = {torch.uint32: torch.int32, torch.uint64: torch.int64}
_HALVES = frozenset({torch.float16, torch.bfloat16})


class Carrier(NamedTuple):
    """A tensor to reduce in place of another: reduce `tensor` (contiguous, of a NATIVE type) with `op`, then call
    `bring_back` if there is one."""

    tensor: torch.Tensor
    op: ReduceOp
    bring_back: Callable[[], None] | None = None


def carrier_of(tensor: torch.Tensor, op: ReduceOp) -> Carrier:
    """Returns the carrier of `tensor` for `op`. tensor: contiguous; the result of the reduction is to be in it."""
    dtype = tensor.dtype
    if op in BITWISE and (dtype.is_floating_point or dtype.is_complex):
        raise TypeError(f"{op.value} works on whole numbers and booleans, not on {dtype}")
    if dtype in NATIVE:
        return Carrier(tensor, op)
    if dtype is torch.bool:
        if op is ReduceOp.AVG:
            raise TypeError(
                "the average of booleans is no boolean; convert the tensor to a floating type first"
            )
        return Carrier(tensor.view(torch.uint8), _OF_BOOLEANS[op])
    if op in BITWISE and not tensor.is_quantized:
        return Carrier(_flat_view(tensor, torch.uint8), op)
    if dtype.is_complex:
        if op not in _ADDING:
            raise TypeError(f"{op.value} of {dtype} is not supported; complex numbers have SUM and AVG")
        return carrier_of(torch.view_as_real(tensor), op)
    if dtype in _SIGNED and op in (ReduceOp.SUM, ReduceOp.PRODUCT):
        return Carrier(tensor.view(_SIGNED[dtype]), op)  # the same bits, modulo 2 to the width
    if dtype not in _WIDER:
        raise TypeError(f"{op.value} of {dtype} is not supported; convert the tensor to another type first")
    wide = tensor.to(_WIDER[dtype])

    def bring_back() -> None:
        tensor.copy_(wide)

    return Carrier(wide, op, bring_back)


def check_reducible(dtype: torch.dtype, op: ReduceOp) -> None:
    """Raises TypeError if `op` is not defined for tensors of `dtype`."""
    carrier_of(torch.empty(0, dtype=dtype, device="cpu"), op)


def sums_in(dtype: torch.dtype, op: ReduceOp) -> torch.dtype:
    """Returns the type in which parts are added by code of this project: half precision is rounded once, at the end."""
    return torch.float32 if dtype in _HALVES and op not in (ReduceOp.MIN, ReduceOp.MAX) else dtype


def _flat_view(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return tensor.reshape(-1).view(dtype)
