"""Compresses to one bit with error feedback: signs, and each block's mean magnitude; what was not sent is added next
time.

Checks and shapes; the arithmetic is in arithmetic.h, the layout in formats.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bagua_core.kernels import arguments
from bagua_core.kernels.decoding import decompress, reduce_values
from bagua_core.kernels.errors import KernelArgumentError
from bagua_core.kernels.formats import ONE_BIT_BLOCK, one_bit_bytes
from bagua_core.kernels.interface import Code
from bagua_core.kernels.targets import kernels_for


def one_bit_compress(
    values: Tensor,
    error: Tensor,
    out: Tensor | None = None,
    *,
    left: Tensor | None = None,
    block_size: int = ONE_BIT_BLOCK,
) -> Tensor:
    """Compresses t = values + error, each row's signs with the mean |t| of their block; error becomes t - sent. Returns
    out.

    values: [count] or [rows, count]. error: float32 of that shape, zero before the first step. left: like `error`, for
    the new error; None: `error` itself. out: uint8, [one_bit_bytes] or [rows, one_bit_bytes]; made if None. A block
    whose sum of magnitudes is not finite decodes to NaN and keeps its error (0 where that is not finite). block_size:
    elements, a multiple of 64 from 64 to 8,192. Raises KernelArgumentError.
    """
    arguments.check_values("values", values)
    rows = arguments.as_rows("values", values)
    left = error if left is None else left
    for name, tensor in (("error", error), ("left", left)):
        arguments.check_memory(name, tensor, values)
        if tensor.dtype != torch.float32 or tensor.shape != values.shape:
            raise KernelArgumentError(
                f"{name} is {tensor.dtype} of shape {tuple(tensor.shape)}; "
                f"use float32 of shape {tuple(values.shape)}"
            )
    size_bytes = one_bit_bytes(rows.shape[1], block_size)
    if out is None:
        out = torch.empty(*values.shape[:-1], size_bytes, dtype=torch.uint8, device=values.device)
    if values.numel() == 0:
        return out
    compressed = arguments.as_compressed("out", out, rows.shape[0], size_bytes, values)
    kernels_for(values).one_bit_compress(
        rows, error.view(rows.shape), left.view(rows.shape), compressed, block_size
    )
    return out


def one_bit_decompress(
    compressed: Tensor, out: Tensor, *, scale: float = 1.0, add: bool = False, block_size: int = ONE_BIT_BLOCK
) -> Tensor:
    """Sets out = scale * x, or out + scale * x with `add`, where x are the decoded values. Returns out.

    compressed: uint8, [one_bit_bytes] or [rows, one_bit_bytes]. out: values, [count] or [rows, count]. block_size: that
    of one_bit_compress. Raises KernelArgumentError.
    """
    return decompress(Code.ONE_BIT, compressed, out, scale, add, block_size)


def one_bit_reduce_values(
    compressed: Tensor, out: Tensor, *, scale: float = 1.0, block_size: int = ONE_BIT_BLOCK
) -> Tensor:
    """Sets out = scale * (sum over peers), summed as fp32 in the order of the rows. Returns out.

    compressed: uint8, [peers, one_bit_bytes]. out: values, [count]. block_size: that of one_bit_compress. Raises
    KernelArgumentError.
    """
    return reduce_values(Code.ONE_BIT, compressed, out, scale, block_size)
