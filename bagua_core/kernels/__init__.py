"""Provides the kernels of the communication core: one arithmetic, for CUDA and for the CPU, equal bit for bit.

All take and give torch tensors, contiguous, on one device; the device chooses the target. `values` are float32, float16
or bfloat16; compressed tensors are uint8; arithmetic is fp32. On the CPU the calling thread holds no GIL meanwhile and
`torch.get_num_threads()` threads work; on CUDA everything runs on the current stream. Results depend on neither.

Sizes (pure functions; the compressed form does not depend on the dtype):

    minmax_bytes(count, block_size=MINMAX_BLOCK) -> int          about count * 1.004
    one_bit_bytes(count, block_size=ONE_BIT_BLOCK) -> int        about count / 8 * 1.008

Min-max uint8 (docs/kernels.md has the formula). `values` [count] or [rows, count]; each row is compressed by itself:

    minmax_compress(values, out=None, *, block_size=...) -> [minmax_bytes] or [rows, minmax_bytes]
    minmax_decompress(compressed, out, *, scale=1.0, add=False, block_size=...) -> out
        out = scale * x, or out + scale * x with `add`; shapes as above
    minmax_reduce(compressed, count, out=None, *, scale=1.0, block_size=...) -> [minmax_bytes]
        [peers, minmax_bytes]; the compressed form of scale * (sum over peers, fp32, in the order of the rows).
        scale = 1 / peers gives the mean
    minmax_reduce_values(compressed, out, *, scale=1.0, block_size=...) -> out
        the same sum as values, out [count]

One bit with error feedback (t = x + error; sent = sign(t) * mean |t| of its block; error = t - sent):

    one_bit_compress(values, error, out=None, *, left=None, block_size=...) -> [one_bit_bytes] or [rows, one_bit_bytes]
        `error`: float32 of the shape of `values`, zero at first; the new one goes to `left`, or is written in place
    one_bit_decompress(compressed, out, *, scale=1.0, add=False, block_size=...) -> out
    one_bit_reduce_values(compressed, out, *, scale=1.0, block_size=...) -> out

Flat buffers and averages:

    flatten(tensors, out=None, *, dtype=None) -> out             one after the other, cast on the way
    unflatten(flat, tensors) -> None                             the way back, into the tensors
    weighted_average(x, y, x_weight, y_weight) -> x              x = x_weight * x + y_weight * y, in place
    add_difference(x, newer, older, scale=1.0) -> x              x = x + scale * (newer - older), in place

Adam whose second moment rests, in place (adam.py has the formulas):

    adam_steps(values, second, eps, reach, *, before=None, after=None, decay=0.0) -> values
        gradients in units of Adam's steps, outliers cut, and smoothed over steps if there is a `before`
    adam_gradients(values, second, eps) -> values                the way back
    adam_update(parameter, gradient, first, second, *, share, weight_decay, eps, rate) -> parameter

A block that holds NaN, an infinity or a magnitude above 2**126 decodes to NaN throughout: training sees it, as it would
in full precision. NaNs are written as the one canonical NaN.

    target(device="cpu") -> Target(name, reason)    "extension", "fallback" (slow: torch, same bits) or "cuda"

Raises KernelArgumentError for a tensor that does not fit (with the value and the next move), KernelUnavailableError for
a target that BAGUA_KERNELS=extension demands and this machine lacks.
"""

from __future__ import annotations

from bagua_core.kernels.adam import adam_gradients, adam_steps, adam_update
from bagua_core.kernels.averages import add_difference, weighted_average
from bagua_core.kernels.errors import KernelArgumentError, KernelUnavailableError
from bagua_core.kernels.flat_buffers import flatten, unflatten
from bagua_core.kernels.formats import MINMAX_BLOCK, ONE_BIT_BLOCK, minmax_bytes, one_bit_bytes
from bagua_core.kernels.minmax_uint8 import (
    minmax_compress,
    minmax_decompress,
    minmax_reduce,
    minmax_reduce_values,
)
from bagua_core.kernels.one_bit import one_bit_compress, one_bit_decompress, one_bit_reduce_values
from bagua_core.kernels.targets import Target, target

__all__ = [
    "MINMAX_BLOCK",
    "ONE_BIT_BLOCK",
    "KernelArgumentError",
    "KernelUnavailableError",
    "Target",
    "adam_gradients",
    "adam_steps",
    "adam_update",
    "add_difference",
    "flatten",
    "minmax_bytes",
    "minmax_compress",
    "minmax_decompress",
    "minmax_reduce",
    "minmax_reduce_values",
    "one_bit_bytes",
    "one_bit_compress",
    "one_bit_decompress",
    "one_bit_reduce_values",
    "target",
    "unflatten",
    "weighted_average",
]
