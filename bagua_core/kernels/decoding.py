"""Decodes compressed forms to values, alone or summed over peers: the part that all compressed forms have in common."""

from __future__ import annotations

from torch import Tensor

from bagua_core.kernels import arguments
from bagua_core.kernels.errors import KernelArgumentError
from bagua_core.kernels.formats import minmax_bytes, one_bit_bytes
from bagua_core.kernels.interface import Code
from bagua_core.kernels.targets import kernels_for

SIZE_OF = {Code.MINMAX: minmax_bytes, Code.ONE_BIT: one_bit_bytes}


def decompress(
    code: Code, compressed: Tensor, out: Tensor, scale: float, add: bool, block_size: int
) -> Tensor:
    """Decodes each row by itself to `out`, [count] or [rows, count]. Raises KernelArgumentError."""
    arguments.check_values("out", out)
    arguments.check_scale("scale", scale)
    values = arguments.as_rows("out", out)
    size_bytes = SIZE_OF[code](values.shape[1], block_size)
    if out.numel() == 0:
        return out
    rows = arguments.as_compressed("compressed", compressed, values.shape[0], size_bytes, out)
    kernels_for(out).decompress(code, rows, values, scale, add, block_size)
    return out


def reduce_values(code: Code, compressed: Tensor, out: Tensor, scale: float, block_size: int) -> Tensor:
    """Decodes all rows and writes their sum to `out`, [count]. Raises KernelArgumentError."""
    arguments.check_values("out", out)
    arguments.check_scale("scale", scale)
    if out.dim() != 1:
        raise KernelArgumentError(f"out has the shape {tuple(out.shape)}; use [count]")
    rows = arguments.as_compressed(
        "compressed", compressed, None, SIZE_OF[code](out.numel(), block_size), out
    )
    if out.numel():
        kernels_for(out).reduce_values(code, rows, out, scale, block_size)
    return out
