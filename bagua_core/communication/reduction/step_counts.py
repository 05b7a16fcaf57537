"""Decides whether all ranks took the same number of optimizer steps in the job's last step.

Each rank that committed that step by itself adds (1, c, c*c) to three numbers beside the switch pair; c is its number
of optimizer steps. A rank that copied the state of that step adds zeros. The sums alone tell whether all c are equal;
ranks exchange their counts only to name a difference. Pure; exact in fp32 for LARGEST_COUNT in 4,096 ranks.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

from bagua_core.errors import UserError

LARGEST_COUNT = 63  # 4096 * 63**2 < 2**24; a larger count is compared as this one
NOT_COUNTED = -1


class OptimizerStepsDiffer(UserError, RuntimeError):
    """Ranks took different numbers of optimizer steps in one step of the job, so their parameters differ."""


@functools.lru_cache(maxsize=LARGEST_COUNT + 2)
def contribution(count: int | None) -> tuple[float, float, float]:
    """Returns what a rank adds to the sums. count: None if it did not commit the last step by itself."""
    if count is None:
        return 0.0, 0.0, 0.0
    bounded = min(count, LARGEST_COUNT)
    return 1.0, float(bounded), float(bounded * bounded)


def differ(sums: tuple[float, float, float]) -> bool:
    """Tells whether two ranks that were counted have different counts. sums: of all ranks' contributions."""
    ranks, total, squares = sums
    # equality in Cauchy-Schwarz holds for equal numbers only
    return int(ranks) * int(squares) != int(total) ** 2


def explain(counts: Sequence[int], step: int) -> str:
    """Returns the error's text. counts: by global rank, NOT_COUNTED for those that were not counted; step: committed
    steps."""
    counted = [(rank, count) for rank, count in enumerate(counts) if count != NOT_COUNTED]
    first, of_first = counted[0] if counted else (0, 0)
    other = next(((rank, count) for rank, count in counted if count != of_first), None)
    if other is None:
        return inexact(f"in step {step} all ranks took {_steps(of_first)}")
    second, of_second = other
    return (
        f"in step {step} rank {first} took {_steps(of_first)} and rank {second} took {_steps(of_second)}, so their "
        "parameters differ. A worker that joins starts its own loop counters at 0: decide when to call "
        "optimizer.step() by the job's own position: `for i, batch in loader.enumerate()`, loader.step, or what "
        "bagua.next_step() returns"
    )


def inexact(all_equal: str) -> str:
    """Returns the error's text where the numbers of all ranks are equal, but not by their sums. all_equal: what is
    equal."""
    return (
        f"{all_equal}, but the sums over all ranks do not say so: what carries the gradients of the last bucket does "
        "not sum float32 exactly"
    )


def _steps(count: int) -> str:
    return f"{count} optimizer step" + ("" if count == 1 else "s")
