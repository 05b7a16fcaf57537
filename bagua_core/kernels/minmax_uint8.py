"""Compresses to min-max uint8: values as codes on a grid of 256 between the least and the greatest of their block.

Checks and shapes; the arithmetic is in arithmetic.h, the layout in formats.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bagua_core.kernels import arguments
from bagua_core.kernels.decoding import decompress, reduce_values
from bagua_core.kernels.formats import MINMAX_BLOCK, minmax_bytes
from bagua_core.kernels.interface import Code
from bagua_core.kernels.targets import kernels_for


def minmax_compress(values: Tensor, out: Tensor | None = None, *, block_size: int = MINMAX_BLOCK) -> Tensor:
    """Compresses each row by itself to min-max uint8. Returns out.

    values: [count] or [rows, count]. out: uint8, [minmax_bytes] or [rows, minmax_bytes]; made if None. The error is at
    most half a step, (greatest - least) / 510, in every block; zero stays exactly zero in a block that has values on
    both sides of it or equal to it. block_size: elements, a multiple of 64 from 64 to 8,192.
    Raises KernelArgumentError.
    """
    arguments.check_values("values", values)
    rows = arguments.as_rows("values", values)
    size_bytes = minmax_bytes(rows.shape[1], block_size)
    if out is None:
        out = torch.empty(*values.shape[:-1], size_bytes, dtype=torch.uint8, device=values.device)
    if values.numel() == 0:
        return out
    compressed = arguments.as_compressed("out", out, rows.shape[0], size_bytes, values)
    kernels_for(values).minmax_compress(rows, compressed, block_size)
    return out


def minmax_decompress(
    compressed: Tensor, out: Tensor, *, scale: float = 1.0, add: bool = False, block_size: int = MINMAX_BLOCK
) -> Tensor:
    """Sets out = scale * x, or out + scale * x with `add`, where x are the decoded values. Returns out.

    compressed: uint8, [minmax_bytes] or [rows, minmax_bytes]. out: values, [count] or [rows, count]. block_size: that
    of minmax_compress. Raises KernelArgumentError.
    """
    return decompress(Code.MINMAX, compressed, out, scale, add, block_size)


def minmax_reduce(
    compressed: Tensor,
    count: int,
    out: Tensor | None = None,
    *,
    scale: float = 1.0,
    block_size: int = MINMAX_BLOCK,
) -> Tensor:
    """Writes the compressed form of scale * (sum over peers) to `out`, summed as fp32 in the order of the rows. Returns
    out.

    compressed: uint8, [peers, minmax_bytes]. count: values in each. out: uint8, [minmax_bytes]; made if None.
    block_size: that of minmax_compress. Raises KernelArgumentError.
    """
    size_bytes = minmax_bytes(count, block_size)
    arguments.check_scale("scale", scale)
    rows = arguments.as_compressed("compressed", compressed, None, size_bytes)
    if out is None:
        out = torch.empty(size_bytes, dtype=torch.uint8, device=compressed.device)
    single = arguments.as_compressed("out", out, 1, size_bytes, compressed)
    if count:
        kernels_for(compressed).minmax_reduce(rows, count, single[0], scale, block_size)
    return out


def minmax_reduce_values(
    compressed: Tensor, out: Tensor, *, scale: float = 1.0, block_size: int = MINMAX_BLOCK
) -> Tensor:
    """Sets out = scale * (sum over peers), summed as fp32 in the order of the rows. Returns out.

    compressed: uint8, [peers, minmax_bytes]. out: values, [count]. block_size: that of minmax_compress. Raises
    KernelArgumentError.
    """
    return reduce_values(Code.MINMAX, compressed, out, scale, block_size)
