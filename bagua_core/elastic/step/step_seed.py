"""Seeds the random numbers of a step on this rank, from (seed, step, global rank) alone.

So a step that is done again draws what it drew, no two ranks share a dropout mask, and nothing about random
state has to be healed or saved.
"""

from __future__ import annotations

import torch

_MASK = (1 << 64) - 1


def _mixed(value: int) -> int:
    """splitmix64's finalizer (Steele, Lea, Flood 2014): neighbouring inputs give unrelated outputs."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def step_seed(seed: int, step: int, global_rank: int) -> int:
    """A 63-bit seed."""
    return _mixed(_mixed(_mixed(seed & _MASK) ^ step) ^ global_rank) >> 1


def seed_generators(seed: int, step: int, global_rank: int) -> None:
    value = step_seed(seed, step, global_rank)
    # torch.manual_seed also walks every device backend, ten times the cost of the one generator in use.
    torch.default_generator.manual_seed(value)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed(value)
