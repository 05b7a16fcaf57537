"""The slow reference of the kernels: one value at a time, as docs/kernels.md specifies.

Shares nothing with bagua_core/kernels but the layout. Floats are np.float32, whose +, -, *, / round as IEEE 754 says.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

F = np.float32


def values_of(tensor: Tensor) -> list[np.float32]:
    """Exact for every dtype of values."""
    return list(tensor.detach().reshape(-1).to(torch.float32).numpy())


def blocks_of(values: Sequence[np.float32], block_size: int) -> list[list[np.float32]]:
    return [list(values[at : at + block_size]) for at in range(0, len(values), block_size)]


def padded(data: bytes) -> bytes:
    return data + bytes(-len(data) % 16)


def minmax_compressed(values: Sequence[np.float32], block_size: int) -> bytes:
    headers, codes = b"", b""
    for block in blocks_of(values, block_size):
        low, step = minmax_grid(block)
        headers += F(low).tobytes() + F(step).tobytes()
        codes += bytes(minmax_code(x, low, step) for x in block)
    return padded(headers) + padded(codes)


def minmax_grid(block: Sequence[np.float32]) -> tuple[np.float32, np.float32]:
    """low, step."""
    if any(not abs(float(x)) <= 2.0**126 for x in block):
        return F(math.nan), F(0)
    least, most = min(block), max(block)
    step = max(F(F(most - least) / F(255)), F(2.0**-126))
    if least <= 0 <= most:
        zero_code = round(float(F(-least * F(F(1) / step))))
        return F(F(0) - F(F(zero_code) * step)), step
    return least, step


def minmax_code(x: np.float32, low: np.float32, step: np.float32) -> int:
    if math.isnan(low):
        return 0
    return min(max(round(float(F(F(x - low) * F(F(1) / step)))), 0), 255)


def minmax_decoded(data: bytes, count: int, block_size: int) -> list[np.float32]:
    blocks = -(-count // block_size)
    codes_at = len(padded(bytes(8 * blocks)))
    decoded = []
    for i in range(count):
        low, step = np.frombuffer(data, F, 2, 8 * (i // block_size))
        decoded.append(F(low + F(F(data[codes_at + i]) * step)))
    return decoded


def one_bit_compressed(
    values: Sequence[np.float32], error: Sequence[np.float32], block_size: int
) -> tuple[bytes, list[np.float32]]:
    """The compressed form and the error that is left."""
    headers, bits, left = b"", b"", []
    pairs = zip(blocks_of(values, block_size), blocks_of(error, block_size), strict=True)
    for block, old in pairs:
        t = [F(x + e) for x, e in zip(block, old, strict=True)]
        total = sum_of_magnitudes(t)
        if not math.isfinite(total):
            headers += F(math.nan).tobytes()
            bits += bytes(-(-len(t) // 8))
            left += [e if math.isfinite(e) else F(0) for e in old]
            continue
        scale = F(total / F(len(t)))
        headers += scale.tobytes()
        for at in range(0, len(t), 8):
            bits += bytes([sum(1 << j for j, x in enumerate(t[at : at + 8]) if x < 0)])
        left += [F(x - (-scale if x < 0 else scale)) for x in t]
    return padded(headers) + padded(bits), left


@np.errstate(over="ignore")
def sum_of_magnitudes(t: Sequence[np.float32]) -> np.float32:
    lanes = [F(0)] * 1024
    for i, x in enumerate(t):
        lanes[i % 1024] = F(lanes[i % 1024] + abs(x))
    while len(lanes) > 1:
        half = len(lanes) // 2
        lanes = [F(lanes[j] + lanes[j + half]) for j in range(half)]
    return lanes[0]


def one_bit_decoded(data: bytes, count: int, block_size: int) -> list[np.float32]:
    blocks = -(-count // block_size)
    bits_at = len(padded(bytes(4 * blocks)))
    decoded = []
    for i in range(count):
        scale = np.frombuffer(data, F, 1, 4 * (i // block_size))[0]
        is_negative = data[bits_at + i // 8] >> (i % 8) & 1
        decoded.append(-scale if is_negative else scale)
    return decoded


def summed(rows: Sequence[Sequence[np.float32]], scale: float) -> list[np.float32]:
    """scale * (sum over rows), in the order of the rows."""
    totals = []
    for column in zip(*rows, strict=True):
        total = column[0]
        for x in column[1:]:
            total = F(total + x)
        totals.append(F(total * F(scale)))
    return totals


@np.errstate(all="ignore")
def adam_steps(
    values: Sequence[np.float32], second: Sequence[np.float32], eps: float, reach: float
) -> list[np.float32]:
    """In units of Adam's steps, with outliers of each block of 4,096 cut."""
    steps = []
    for gradients, seconds in zip(blocks_of(values, 4096), blocks_of(second, 4096), strict=True):
        block = [F(g / F(F(np.sqrt(v)) + F(eps))) for g, v in zip(gradients, seconds, strict=True)]
        limit = F(F(reach) * F(sum_of_magnitudes(block) / F(len(block))))
        steps += [limit if x > limit else -limit if x < -limit else x for x in block]
    return steps


@np.errstate(all="ignore")
def adam_gradients(steps: Sequence[np.float32], second: Sequence[np.float32], eps: float) -> list[np.float32]:
    scales = [F(F(np.sqrt(v)) + F(eps)) for v in second]
    return [F(x * (s if math.isfinite(s) else F(0))) for x, s in zip(steps, scales, strict=True)]


@np.errstate(all="ignore")
def adam_updated(
    parameter: np.float32,
    gradient: np.float32,
    first: np.float32,
    second: np.float32,
    share: float,
    weight_decay: float,
    eps: float,
    rate: float,
) -> tuple[np.float32, np.float32]:
    """(first moment, parameter)."""
    m = F(first + F(F(share) * F(F(gradient + F(F(weight_decay) * parameter)) - first)))
    return m, F(parameter - F(F(rate) * F(m / F(F(np.sqrt(second)) + F(eps)))))


def stored(values: Sequence[np.float32], dtype: torch.dtype) -> Tensor:
    """As a tensor of `dtype`, to nearest, ties to even; NaN is the canonical one."""
    tensor = torch.from_numpy(np.array(values, F)).to(dtype)
    quiet = {torch.float32: 0x7FC00000, torch.float16: 0x7E00, torch.bfloat16: 0x7FC0}[dtype]
    whole = torch.int32 if dtype == torch.float32 else torch.int16
    bits = tensor.view(whole).clone()
    bits[tensor.isnan()] = quiet
    return bits.view(dtype)


def bits_of(tensor: Tensor) -> Tensor:
    """For comparisons in which NaN equals NaN and -0 differs from 0."""
    return tensor.detach().contiguous().view(torch.uint8)
