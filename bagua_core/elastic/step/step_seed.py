"""Seeds the random numbers of a step on this rank, from (seed, step, global rank) alone.

So a step that is done again draws what it drew, no two ranks share a dropout mask, and nothing about random
state has to be healed or saved. In a deterministic job the virtual shard takes the place of the rank, and NumPy's and
Python's generators are seeded too.
"""

from __future__ import annotations

import functools
import random
import sys

import torch

from bagua_core.communication.step_interface import MicroBatch, StepPlan

BETWEEN_STEPS = 1 << 32
"""In place of a shard's number."""

_MASK = (1 << 64) - 1


@functools.lru_cache(maxsize=16)
def _mixed_seed(seed: int) -> int:
    return _mixed(seed & _MASK)


def _mixed(value: int) -> int:
    """Applies splitmix64's finalizer (Steele, Lea, Flood 2014): neighbouring inputs give unrelated outputs."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def step_seed(seed: int, step: int, global_rank: int) -> int:
    """Returns the seed of a step on one rank: 63 bits."""
    return _mixed(_mixed(_mixed_seed(seed) ^ step) ^ global_rank) >> 1


def announced_seed(seed: int) -> int:
    """Returns the seed of what the script draws between next_step() and its first forward: the forward draws other
    numbers."""
    return _mixed_seed(seed)


def seed_generators(seed: int, step: int, global_rank: int) -> None:
    value = step_seed(seed, step, global_rank)
    # torch.manual_seed also walks every device backend, ten times the cost of the one generator in use.
    torch.default_generator.manual_seed(value)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed(value)


def seed_micro_batch(
    seed: int, plan: StepPlan, micro_batch: MicroBatch, place_in_replica: tuple[int, int] = (0, 1)
) -> None:
    """Seeds the generators for the micro-batch that begins, which is the step's first, or a shard.

    place_in_replica: see DataSource: workers with samples of their own draw from numbers of their own.
    """
    if not micro_batch.shards:
        place, places = place_in_replica
        seed_generators(seed, plan.step, plan.global_rank * places + place)
        return
    # a worker without a shard draws what no other draws, and its results are dropped
    shard = micro_batch.shards + plan.global_rank if micro_batch.shard is None else micro_batch.shard
    _seed_all(step_seed(seed, plan.step, shard))


def seed_between_steps(seed: int, step: int) -> None:
    """Seeds what a deterministic job draws outside steps, the same on all workers. step: committed steps."""
    _seed_all(step_seed(seed, step, BETWEEN_STEPS))


def _seed_all(value: int) -> None:
    random.seed(value)
    numpy = sys.modules.get("numpy")
    if numpy is not None and hasattr(numpy, "random"):
        numpy.random.seed(value & 0xFFFFFFFF)
    torch.default_generator.manual_seed(value)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed(value)
