"""The switch pair: two numbers in a step's last reduction that show whether all ranks have the same pending generation.

Owns the arithmetic of rule 2 of a step: each rank contributes (v, v*v), the reduction sums both, and the sums
alone tell whether every v was the same and not 0. Pure; knows no communicator.
Exact in fp32 because every partial sum is a whole number of at most 2**24. Anything beyond is left out, never rounded.
"""

from __future__ import annotations

from math import isqrt

LARGEST_WORLD = 4096
LARGEST_LEAP = 64  # in the largest world
_EXACT_IN_FP32 = 2**24  # == LARGEST_WORLD * LARGEST_LEAP**2


def largest_leap(world_size: int) -> int:
    """Returns how far ahead of the current generation a pending one may be for its pair to be exact."""
    return isqrt(_EXACT_IN_FP32 // world_size)


def contribution(pending: int | None, current: int, built: bool, world_size: int = LARGEST_WORLD) -> float:
    """Returns v of this rank: generations between current and pending, once pending's communicator is built; else 0.

    A leap beyond `largest_leap` is 0 too. The members go on without that generation, and the next failover generation
    shortens the leap. A pending generation is made anew whenever one of its joiners ends, however long a step lasts.
    """
    if pending is None or not built or not current < pending <= current + largest_leap(world_size):
        return 0.0
    return float(pending - current)


def agreed(pair: tuple[float, float], world_size: int) -> int | None:
    """Returns the v that all world_size ranks contributed, or None if they differ or it is 0.

    pair: (sum of v, sum of v*v), summed and not averaged.
    Raises ValueError for a pair that no such sum gives, or a world too large for it.
    """
    total, squares = pair
    if not 1 <= world_size <= LARGEST_WORLD:
        raise ValueError(f"a switch pair covers 1 to {LARGEST_WORLD} ranks, not {world_size}")
    if total == 0 and squares == 0:
        return None
    if not (0 <= total <= squares <= _EXACT_IN_FP32 and total.is_integer() and squares.is_integer()):
        raise ValueError(f"({total}, {squares}) is no sum of switch pairs")
    # Python's integers: W times the squares may exceed what any float holds exactly.
    whole, whole_squares = int(total), int(squares)
    if world_size * whole_squares != whole * whole:
        return None
    # equality in Cauchy-Schwarz: all v equal, so W divides their sum
    return whole // world_size
