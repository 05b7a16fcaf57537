"""Runs the kernels by torch's operators, for CPU and CUDA tensors: many times slower than compiled ones, the same bits.

The arithmetic is that of arithmetic.h over whole tensors: torch's operators round +, -, * and / of float32 as IEEE 754
says, and one operator is never contracted with the next. Divisors are tensors, for torch multiplies CUDA tensors by the
inverse of a number. Nothing waits for a device. See Kernels in interface.py.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from bagua_core.kernels.formats import minmax_payload_at, one_bit_payload_at
from bagua_core.kernels.interface import Code
from bagua_core.kernels.minmax_grid import in_blocks, minmax_codes

NAN_BITS = {torch.float32: 0x7FC00000, torch.float16: 0x7E00, torch.bfloat16: 0x7FC0}
SUM_LANES = 1024
STEPS_BLOCK = 4096


class FallbackKernels:
    def minmax_compress(self, values: Tensor, out: Tensor, block_size: int) -> None:
        headers, codes = minmax_codes(_floats(values), block_size, 255)
        _write(out, headers, codes, minmax_payload_at(values.shape[1], block_size))

    def minmax_reduce(
        self, compressed: Tensor, count: int, out: Tensor, scale: float, block_size: int
    ) -> None:
        total = _sum(Code.MINMAX, compressed, count, block_size) * scale
        self.minmax_compress(total[None], out[None], block_size)

    def one_bit_compress(
        self, values: Tensor, error: Tensor, left: Tensor, out: Tensor, block_size: int
    ) -> None:
        count, before = values.shape[1], error.detach()
        t = _floats(values) + before
        blocks = in_blocks(t, block_size)
        total = _sums_of_magnitudes(blocks)
        is_finite = total.isfinite()
        scale = (total / _lengths(count, block_size, t)).where(is_finite, torch.nan)
        is_negative = ((blocks < 0.0) & is_finite[..., None]).flatten(1)
        signs = (is_negative.view(len(t), -1, 8) << _bits(t)).sum(-1, dtype=torch.uint8)[:, : -(-count // 8)]
        _write(out, scale, signs, one_bit_payload_at(count, block_size))
        scale_of = _of_each(scale, count, block_size)
        kept = before.where(before.isfinite(), 0.0)
        left.detach().copy_(
            torch.where(scale_of.isnan(), kept, t - torch.where(t < 0.0, -scale_of, scale_of))
        )

    def decompress(
        self, code: Code, compressed: Tensor, out: Tensor, scale: float, add: bool, block_size: int
    ) -> None:
        decoded = _decode(code, compressed, out.shape[1], block_size) * scale
        _store(_floats(out) + decoded if add else decoded, out)

    def reduce_values(
        self, code: Code, compressed: Tensor, out: Tensor, scale: float, block_size: int
    ) -> None:
        _store(_sum(code, compressed, out.numel(), block_size) * scale, out)

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
        _store(x_weight * _floats(x) + y_weight * _floats(y), x)

    def add_difference(self, x: Tensor, newer: Tensor, older: Tensor, scale: float) -> None:
        _store(_floats(x) + scale * (_floats(newer) - _floats(older)), x)

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
        count = values.numel()
        steps = _floats(values) / _adam_scale(second, eps)
        blocks = in_blocks(steps[None], STEPS_BLOCK)
        limit = reach * (_sums_of_magnitudes(blocks) / _lengths(count, STEPS_BLOCK, steps))[..., None]
        blocks = torch.where(blocks > limit, limit, torch.where(blocks < -limit, -limit, blocks))
        steps = blocks.flatten()[:count]
        if before is not None and after is not None:
            steps = decay * before.detach() + steps
            after.detach().copy_(steps.where(steps.isfinite(), 0.0))
        _store(steps, values)

    def adam_gradients(self, values: Tensor, second: Tensor, eps: float) -> None:
        scale = _adam_scale(second, eps)
        _store(_floats(values) * scale.where(scale.isfinite(), 0.0), values)

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
        x, m = _floats(parameter), _floats(first)
        m = m + share * ((_floats(gradient) + weight_decay * x) - m)
        moved = x - rate * (m / _adam_scale(second, eps))
        _store(m, first)
        _store(moved, parameter)


def _adam_scale(second: Tensor, eps: float) -> Tensor:
    # by way of double: the vector library's root of float32 is not always the nearest one
    return second.detach().double().sqrt().float() + eps


def _floats(values: Tensor) -> Tensor:
    """Returns the values as float32; memory of its own unless they are float32 already."""
    return values.detach().float()


def _store(x: Tensor, out: Tensor) -> None:
    """Writes x to `out` of any dtype of values, to nearest, ties to even; NaNs become the canonical one."""
    out = out.detach()
    out.copy_(x)
    integer = torch.int32 if out.dtype == torch.float32 else torch.int16
    out.view(integer).masked_fill_(x.isnan(), NAN_BITS[out.dtype])


def _of_each(of_block: Tensor, count: int, block_size: int) -> Tensor:
    """Returns [rows, blocks] as [rows, count]: each value has its block's."""
    return of_block[..., None].expand(-1, -1, block_size).flatten(1)[:, :count]


def _lengths(count: int, block_size: int, like: Tensor) -> Tensor:
    """Returns the number of values in each block."""
    lengths = torch.full((-(-count // block_size),), block_size, dtype=torch.float32, device=like.device)
    lengths[-1] = (count - 1) % block_size + 1
    return lengths


def _sums_of_magnitudes(blocks: Tensor) -> Tensor:
    """Sums the magnitudes of the last dimension: strided lanes, each in order, then folds by halves."""
    padded = pad(blocks.abs(), (0, -blocks.shape[-1] % SUM_LANES))
    first, *others = torch.split(padded, SUM_LANES, -1)
    lanes = first
    for part in others:
        lanes = lanes + part
    while lanes.shape[-1] > 1:
        low, high = lanes.chunk(2, -1)
        lanes = low + high
    return lanes[..., 0]


def _bits(like: Tensor) -> Tensor:
    return torch.arange(8, dtype=torch.uint8, device=like.device)


def _write(out: Tensor, headers: Tensor, payload: Tensor, payload_at: int) -> None:
    """Writes a compressed form: headers (float32) and payload (uint8) of each row, each padded with zeros."""
    out.zero_()
    out[:, : 4 * headers.shape[1]] = headers.contiguous().view(torch.uint8)
    out[:, payload_at : payload_at + payload.shape[1]] = payload


def _decode(code: Code, rows: Tensor, count: int, block_size: int) -> Tensor:
    """Decodes `rows` to [rows, count]."""
    blocks = -(-count // block_size)
    if code is Code.MINMAX:
        payload_at = minmax_payload_at(count, block_size)
        headers = rows[:, :payload_at].view(torch.float32)[:, : 2 * blocks].view(len(rows), blocks, 2)
        low, step = (_of_each(headers[..., i], count, block_size) for i in (0, 1))
        return rows[:, payload_at : payload_at + count].float().mul_(step).add_(low)
    payload_at = one_bit_payload_at(count, block_size)
    scale = _of_each(rows[:, :payload_at].view(torch.float32)[:, :blocks], count, block_size)
    is_negative = (rows[:, payload_at:, None] >> _bits(rows) & 1).flatten(1)[:, :count].bool()
    return torch.where(is_negative, -scale, scale)


def _sum(code: Code, compressed: Tensor, count: int, block_size: int) -> Tensor:
    """Decodes all peers' rows and returns their sum, [count]; peer by peer, for bounded memory."""
    total = _decode(code, compressed[:1], count, block_size)
    for row in torch.split(compressed[1:], 1):
        total = total + _decode(code, row, count, block_size)
    return total[0]
