"""Computes the min-max grid of a block's values by torch's operators, for any number of codes: the formula of
arithmetic.h.

Codes 0 to `most_code` stand for low + code * step. A range that holds zero has zero on the grid.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

LARGEST = 2.0**126
SMALLEST_STEP = 2.0**-126
ROUNDER = 12582912.0  # 1.5 * 2**23: adding it leaves the nearest integer


def in_blocks(x: Tensor, block_size: int, mode: str = "constant") -> Tensor:
    """Returns [rows, count] as [rows, blocks, block_size]; what is missing in the last block is 0 or the last value."""
    missing = -x.shape[1] % block_size
    if missing:
        x = pad(x, (0, missing), mode)
    return x.view(len(x), -1, block_size)


def minmax_codes(x: Tensor, block_size: int, most_code: int) -> tuple[Tensor, Tensor]:
    """Returns (low and step of each block, float32, [rows, 2 * blocks]; codes, uint8, [rows, count]).

    x: float32, [rows, count]. A block that holds NaN, an infinity or a magnitude above LARGEST has a low of NaN.
    """
    blocks = in_blocks(x, block_size, "replicate")
    least, most = blocks.amin(-1), blocks.amax(-1)  # NaN where a block holds one; aminmax is not vectorized
    is_representable = (least.abs() <= LARGEST) & (most.abs() <= LARGEST)
    step = ((most - least) / torch.full_like(most, float(most_code))).clamp(min=SMALLEST_STEP)
    inverse = torch.ones_like(step) / step
    zero_code = (-least * inverse + ROUNDER) - ROUNDER
    low = torch.where((least <= 0.0) & (most >= 0.0), 0.0 - zero_code * step, least)
    codes = (blocks - low[..., None]).mul_(inverse[..., None]).clamp_(0.0, float(most_code))
    codes = codes.round_().masked_fill_(~is_representable[..., None], 0.0).to(torch.uint8)  # ties to even
    low, step = low.where(is_representable, torch.nan), step.where(is_representable, 0.0)
    return torch.stack((low, step), -1).flatten(1), codes.flatten(1)[:, : x.shape[1]]
