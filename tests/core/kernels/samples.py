"""Tensors that kernels find hard, drawn from a seed."""

from __future__ import annotations

import math

import torch
from torch import Tensor

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# Edges of bytes, quads, blocks of 64 and 1,024 and rows of lanes, and what is a multiple of nothing.
COUNTS = (1, 3, 7, 8, 9, 31, 32, 33, 63, 64, 65, 127, 257, 1023, 1024, 1025, 2500)


def normal(count: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, generator=generator).to(dtype)


def unaligned(values: Tensor) -> Tensor:
    """Equal values at an odd place in memory."""
    space = torch.empty(values.numel() + 3, dtype=values.dtype)
    view = space[1 : 1 + values.numel()]
    return view.copy_(values)


def hard_blocks(dtype: torch.dtype) -> dict[str, Tensor]:
    """One block of 64 for each difficulty."""
    largest = torch.finfo(dtype).max
    tiny = torch.finfo(dtype).tiny
    ramp = torch.linspace(-1, 1, 64)
    made = {
        "zeros": torch.zeros(64),
        "minus zeros": -torch.zeros(64),
        "both zeros": torch.tensor([0.0, -0.0] * 32),
        "equal": torch.full((64,), 3.14159),
        "equal, negative": torch.full((64,), -3.14159),
        "all positive": ramp + 7,
        "all negative": ramp - 7,
        "narrow, far from zero": 1000 + ramp * 2**-5,
        "denormal": ramp * tiny,
        "one denormal": torch.tensor([0.0] * 63 + [tiny / 4]),
        "tiny": ramp * 1e-7 if dtype == torch.float16 else ramp * 1e-9,
        "tinier": ramp * 1e-30,
        "one spike": torch.tensor([1e-3] * 63 + [1e3]),
        "zero least": ramp + 1,
        "zero most": ramp - 1,
        "large": ramp * min(largest, 2.0**126),
        "largest": ramp * largest,
        "infinity": torch.tensor([0.5] * 63 + [math.inf]),
        "minus infinity": torch.tensor([0.5] * 63 + [-math.inf]),
        "both infinities": torch.tensor([math.inf, -math.inf] * 32),
        "NaN": torch.tensor([math.nan] + [0.5] * 63),
        "minus NaN": torch.tensor([0.5] * 63 + [-math.nan]),
        "halves": torch.arange(64) / 2 - 16 + 0.25,
    }
    return {name: values.to(dtype) for name, values in made.items()}
