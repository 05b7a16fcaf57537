"""The kernels on CPU tensors without the compiled library: NumPy, many times slower, the same bits.

The arithmetic is that of arithmetic.h over whole arrays: NumPy rounds +, -, *, / of float32 as IEEE 754 says and
contracts nothing. See Kernels in interface.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bagua_core.kernels.formats import minmax_payload_at, one_bit_payload_at
from bagua_core.kernels.interface import Code

Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]

NAN = np.uint32(0x7FC00000).view(np.float32)
LARGEST = np.float32(2.0**126)
SMALLEST_STEP = np.float32(2.0**-126)
ROUNDER = np.float32(12582912.0)  # 1.5 * 2**23: adding it leaves the nearest integer
SUM_LANES = 1024
STEPS_BLOCK = 4096
LARGEST_FLOAT = np.finfo(np.float32).max


class FallbackKernels:
    def minmax_compress(self, values: Tensor, out: Tensor, block_size: int) -> None:
        for x, row in zip(_floats(values), out.numpy(), strict=True):
            _minmax_compress(x, row, block_size)

    def minmax_reduce(
        self, compressed: Tensor, count: int, out: Tensor, scale: float, block_size: int
    ) -> None:
        with np.errstate(all="ignore"):
            total = _sum(Code.MINMAX, compressed, count, block_size) * np.float32(scale)
        _minmax_compress(total, out.numpy(), block_size)

    def one_bit_compress(
        self, values: Tensor, error: Tensor, left: Tensor, out: Tensor, block_size: int
    ) -> None:
        if left is not error:
            left.copy_(error)
        for x, of_row, row in zip(_floats(values), left.detach().numpy(), out.numpy(), strict=True):
            _one_bit_compress(x, of_row, row, block_size)

    def decompress(
        self, code: Code, compressed: Tensor, out: Tensor, scale: float, add: bool, block_size: int
    ) -> None:
        with np.errstate(all="ignore"):
            decoded = np.stack([_decode(code, row, out.shape[1], block_size) for row in compressed.numpy()])
            decoded *= np.float32(scale)
            if add:
                decoded += _floats(out)
        _store(decoded, out)

    def reduce_values(
        self, code: Code, compressed: Tensor, out: Tensor, scale: float, block_size: int
    ) -> None:
        with np.errstate(all="ignore"):
            total = _sum(code, compressed, out.numel(), block_size) * np.float32(scale)
        _store(total, out)

    def copy_parts(self, flat: Tensor, parts: Sequence[Tensor], into_flat: bool) -> None:
        at = 0
        for part in parts:
            here, own = flat.detach()[at : at + part.numel()], part.detach().view(-1)
            source, destination = (own, here) if into_flat else (here, own)
            if source.dtype == destination.dtype:
                destination.copy_(source)
            else:
                _store(_floats(source), destination)
            at += part.numel()

    def weighted_average(self, x: Tensor, y: Tensor, x_weight: float, y_weight: float) -> None:
        with np.errstate(all="ignore"):
            _store(np.float32(x_weight) * _floats(x) + np.float32(y_weight) * _floats(y), x)

    def add_difference(self, x: Tensor, newer: Tensor, older: Tensor, scale: float) -> None:
        with np.errstate(all="ignore"):
            _store(_floats(x) + np.float32(scale) * (_floats(newer) - _floats(older)), x)

    def adam_steps(
        self,
        values: Tensor,
        second: Tensor,
        before: Tensor | None,
        after: Tensor | None,
        eps: float,
        reach: float,
        decay: float,
    ) -> None:
        with np.errstate(all="ignore"):
            steps = _floats(values) / _adam_scale(second, eps)
            for at in range(0, len(steps), STEPS_BLOCK):
                block = steps[at : at + STEPS_BLOCK]
                limit = np.float32(reach) * (_sum_of_magnitudes(block) / np.float32(len(block)))
                block[:] = np.where(block > limit, limit, np.where(block < -limit, -limit, block))
            if before is not None and after is not None:
                steps = np.float32(decay) * before.numpy() + steps
                after.numpy()[...] = np.where(np.isfinite(steps), steps, np.float32(0.0))
        _store(steps, values)

    def adam_gradients(self, values: Tensor, second: Tensor, eps: float) -> None:
        with np.errstate(all="ignore"):
            scale = _adam_scale(second, eps)
            scale = np.where(scale <= LARGEST_FLOAT, scale, np.float32(0.0))
            _store(_floats(values) * scale, values)

    def adam_update(
        self,
        parameter: Tensor,
        gradient: Tensor,
        first: Tensor,
        second: Tensor,
        share: float,
        weight_decay: float,
        eps: float,
        rate: float,
    ) -> None:
        with np.errstate(all="ignore"):
            x, m = _floats(parameter), _floats(first)
            m = m + np.float32(share) * ((_floats(gradient) + np.float32(weight_decay) * x) - m)
            moved = x - np.float32(rate) * (m / _adam_scale(second, eps))
        _store(m, first)
        _store(moved, parameter)


def _adam_scale(second: Tensor, eps: float) -> Floats:
    return np.asarray(np.sqrt(_floats(second)) + np.float32(eps))


def _floats(values: Tensor) -> Floats:
    """As float32; an array of its own unless they are float32 already."""
    values = values.detach()
    if values.dtype == torch.bfloat16:
        bits = values.view(torch.int16).numpy().view(np.uint16).astype(np.uint32) << np.uint32(16)
        return bits.view(np.float32)
    array: NDArray[Any] = values.numpy()
    with np.errstate(all="ignore"):
        return array.astype(np.float32, copy=False)


def _store(x: Floats, out: Tensor) -> None:
    """Into `out` of any dtype of values, to nearest, ties to even; NaNs become the canonical one."""
    x = np.where(np.isnan(x), NAN, x)
    out = out.detach()
    if out.dtype == torch.bfloat16:
        bits = x.view(np.uint32)
        rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
        narrow = np.where(np.isnan(x), np.uint32(0x7FC0), rounded).astype(np.uint16)
        out.view(torch.int16).numpy().view(np.uint16)[...] = narrow
        return
    with np.errstate(all="ignore"):
        out.numpy()[...] = x


def _minmax_compress(x: Floats, row: Bytes, block_size: int) -> None:
    row[:] = 0
    headers = row[: minmax_payload_at(len(x), block_size)].view(np.float32)
    codes = row[minmax_payload_at(len(x), block_size) :]
    for number, at in enumerate(range(0, len(x), block_size)):
        block = x[at : at + block_size]
        low, step = _grid_over(block)
        headers[2 * number : 2 * number + 2] = low, step
        if not np.isnan(low):
            code = (block - low) * (np.float32(1.0) / step)
            code = np.minimum(np.maximum(code, np.float32(0.0)), np.float32(255.0))
            codes[at : at + len(block)] = (code + ROUNDER) - ROUNDER


def _grid_over(block: Floats) -> tuple[np.float32, np.float32]:
    if not np.all(np.abs(block) <= LARGEST):
        return NAN, np.float32(0.0)
    least, most = block.min(), block.max()
    step = np.maximum((most - least) / np.float32(255.0), SMALLEST_STEP)
    low = least
    if least <= 0.0 <= most:
        zero_code = (-least * (np.float32(1.0) / step) + ROUNDER) - ROUNDER
        low = np.float32(0.0) - zero_code * step
    return low, step


def _one_bit_compress(x: Floats, error: Floats, row: Bytes, block_size: int) -> None:
    row[:] = 0
    headers = row[: one_bit_payload_at(len(x), block_size)].view(np.float32)
    signs = row[one_bit_payload_at(len(x), block_size) :]
    for number, at in enumerate(range(0, len(x), block_size)):
        left = error[at : at + block_size]
        with np.errstate(all="ignore"):
            t = x[at : at + block_size] + left
            total = _sum_of_magnitudes(t)
        if not np.isfinite(total):
            headers[number] = NAN
            left[~np.isfinite(left)] = 0.0
            continue
        scale = total / np.float32(len(t))
        headers[number] = scale
        packed = np.packbits(t < 0.0, bitorder="little")
        signs[at // 8 : at // 8 + len(packed)] = packed
        left[:] = t - np.where(t < 0.0, -scale, scale)


def _sum_of_magnitudes(t: Floats) -> np.float32:
    """Strided lanes, each in order, then folds by halves."""
    padded = np.zeros(-(-len(t) // SUM_LANES) * SUM_LANES, np.float32)
    padded[: len(t)] = np.abs(t)
    lanes = np.zeros(SUM_LANES, np.float32)
    for part in padded.reshape(-1, SUM_LANES):
        lanes = lanes + part
    while len(lanes) > 1:
        lanes = lanes[: len(lanes) // 2] + lanes[len(lanes) // 2 :]
    return np.float32(lanes[0])


def _decode(code: Code, row: Bytes, count: int, block_size: int) -> Floats:
    blocks = -(-count // block_size)
    if code is Code.MINMAX:
        payload_at = minmax_payload_at(count, block_size)
        headers = row[:payload_at].view(np.float32)[: 2 * blocks].reshape(blocks, 2)
        low, step = (np.repeat(headers[:, i], block_size)[:count] for i in (0, 1))
        return np.asarray(low + row[payload_at : payload_at + count].astype(np.float32) * step)
    payload_at = one_bit_payload_at(count, block_size)
    scale = np.repeat(row[:payload_at].view(np.float32)[:blocks], block_size)[:count]
    signs = np.unpackbits(row[payload_at:], count=count, bitorder="little")
    return np.where(signs, -scale, scale)


def _sum(code: Code, compressed: Tensor, count: int, block_size: int) -> Floats:
    rows = compressed.numpy()
    total = _decode(code, rows[0], count, block_size)
    for row in rows[1:]:
        total = total + _decode(code, row, count, block_size)
    return total
