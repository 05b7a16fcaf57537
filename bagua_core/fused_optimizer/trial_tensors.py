"""The parameters and gradients that show whether an optimizer cares where one parameter ends and the next begins.

Shapes of every number of dimensions, some of them above the sizes from which optimizers are known to factor, to
precondition or to quantize; parameters of very different norms, one of zeros; gradients from a millionth to a million,
one that is zero for a while. All from a seed: two runs see the same.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from bagua_core.fused_optimizer.block_plan import BlockSizes

SHAPES = ((7,), (1,), (3, 5), (4, 4), (2, 3, 2, 2), (5, 2, 3), (1, 9), (33,), (6, 1), (72, 72), (130, 129))
SMALL = 9  # so many are, and come first
_PARAMETER_SCALES = (1.0, 3.0, 0.0, 1e-3, 0.3, 10.0, 1.0, 0.1, 100.0, 0.05, 1.0)
_GRADIENT_SCALES = (1.0, 1e-3, 0.1, 1e3, 1e-6, 1.0, 0.01, 0.3, 0.03, 1e6, 1.0)
_ZERO_FOR_A_WHILE, _A_WHILE = 7, 6  # parameter, steps
# All kinds of blocks among these shapes: of several, of one that is cut, and one that is left as it is.
SIZES = BlockSizes(pack_below=5000, pack_up_to=60, cut_above=6000)
NATURAL_STEPS = 28  # what begins late by default, begins by the 25th in those that we know
JUMPS = (1_000, 100_000)  # counts of steps are set so far ahead, to see what begins later still
STEPS_AFTER_JUMP = 3
CONFIRMING_STEPS = 6  # in the parameters' own precision, after the long trial in float64
FIRST_STEPS = 3  # on the small ones alone: those that give themselves away there may be slow on large vectors


def parameters(dtype: torch.dtype, device: torch.device, count: int) -> list[torch.nn.Parameter]:
    """Returns the first `count` parameters."""
    generator = torch.Generator().manual_seed(1)
    return [
        torch.nn.Parameter(
            (scale * torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu")).to(
                device, dtype
            )
        )
        for shape, scale in zip(SHAPES[:count], _PARAMETER_SCALES, strict=False)
    ]


def gradients(dtype: torch.dtype, device: torch.device, count: int) -> Iterator[list[Tensor]]:
    """Yields, without end, a step's gradients of the first `count` parameters."""
    generator = torch.Generator().manual_seed(2)
    step = 0
    while True:
        made = []
        for place, (shape, scale) in enumerate(zip(SHAPES[:count], _GRADIENT_SCALES, strict=False)):
            drawn = scale * torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu")
            if place == _ZERO_FOR_A_WHILE and step < _A_WHILE:
                drawn = torch.zeros_like(drawn)
            made.append(drawn.to(device, dtype))
        yield made
        step += 1
