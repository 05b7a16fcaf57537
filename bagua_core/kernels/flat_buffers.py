"""Copies many tensors to one buffer and back: one pass, cast on the way if the buffer has another dtype."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from bagua_core.kernels import arguments
from bagua_core.kernels.errors import KernelArgumentError
from bagua_core.kernels.interface import VALUE_DTYPES
from bagua_core.kernels.targets import kernels_for


def flatten(
    tensors: Sequence[Tensor], out: Tensor | None = None, *, dtype: torch.dtype | None = None
) -> Tensor:
    """Copies the tensors' elements, one after the other, to `out`. Returns out.

    tensors: at least one, all of one dtype and device. out: [sum of counts]; made, of `dtype` or theirs, if None. Any
    dtype can be copied; casts are among float32, float16 and bfloat16. Raises KernelArgumentError.
    """
    if not tensors:
        raise KernelArgumentError("no tensors; a flat buffer needs at least one, or nothing says its dtype")
    if out is None:
        count = sum(t.numel() for t in tensors)
        out = torch.empty(count, dtype=dtype or tensors[0].dtype, device=tensors[0].device)
    elif dtype is not None and dtype != out.dtype:
        raise KernelArgumentError(f"dtype={dtype}, but out is {out.dtype}; give one of them")
    _copy(out, tensors, into_flat=True)
    return out


def unflatten(flat: Tensor, tensors: Sequence[Tensor]) -> None:
    """Reverses `flatten`: copies `flat`, [sum of counts], to the tensors, in place. Raises KernelArgumentError."""
    _copy(flat, tensors, into_flat=False)


def _copy(flat: Tensor, tensors: Sequence[Tensor], *, into_flat: bool) -> None:
    arguments.check_memory("the flat buffer", flat)
    for i, tensor in enumerate(tensors):
        arguments.check_memory(f"tensor {i}", tensor, flat)
        if tensor.dtype != tensors[0].dtype:
            raise KernelArgumentError(
                f"tensor {i} is {tensor.dtype}, tensor 0 {tensors[0].dtype}; group them by dtype"
            )
    count = sum(t.numel() for t in tensors)
    if flat.dim() != 1 or flat.numel() != count:
        raise KernelArgumentError(f"the flat buffer has the shape {tuple(flat.shape)}; use [{count}]")
    if count == 0:
        return
    both = {flat.dtype, tensors[0].dtype}
    if len(both) > 1 and not both <= VALUE_DTYPES.keys():
        raise KernelArgumentError(
            f"no cast between {tensors[0].dtype} and {flat.dtype}; only among float32, float16 and bfloat16"
        )
    kernels_for(flat).copy_parts(flat, [t for t in tensors if t.numel()], into_flat)
