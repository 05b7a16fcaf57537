"""Decides whether all ranks reduce the gradients of the same backward.

A rank that runs a backward more or less than the others in one step would otherwise average its gradients with those of
another step, one off from there on. Each rank adds three sums of its reduction's place, as step_counts.py does for
optimizer steps; the sums alone tell whether all places are equal. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence

from bagua_core.communication.reduction import step_counts
from bagua_core.errors import UserError

NO_PLACE = (-1, -1)
# how many steps, and reductions in one, have places of their own: within step_counts.LARGEST_COUNT
_CYCLE = 8


class BackwardsDiffer(UserError, RuntimeError):
    """Ranks ran different backwards, or forwards that communicate, in one step of the job."""


def contribution(place: tuple[int, int] | None) -> tuple[float, float, float]:
    """Returns what a rank adds to the sums. place: committed steps, and reductions of the model before this one in the
    step; None for a rank that copies the state."""
    if place is None:
        return step_counts.contribution(None)
    step, number = place
    return step_counts.contribution(step % _CYCLE * _CYCLE + number % _CYCLE)


def explain(places: Sequence[tuple[int, int]]) -> str:
    """Returns the error's text. places: (step, number) by global rank, NO_PLACE for those that copied the state."""
    known = [(rank, place) for rank, place in enumerate(places) if place != NO_PLACE]
    first, of_first = known[0] if known else (0, NO_PLACE)
    other = next(((rank, place) for rank, place in known if place != of_first), None)
    if other is None:
        return step_counts.inexact(f"all ranks reduce the gradients of {_backward(of_first)}")
    second, of_second = other
    return (
        f"rank {first} reduces the gradients of {_backward(of_first)} "
        f"and rank {second} those of {_backward(of_second)}. All workers must run the same backwards in each step: a "
        "batch that one worker alone skips or repeats, for example after a loss that is not finite, must be skipped or "
        "repeated by all; bagua.allreduce lets them decide alike"
    )


def _backward(place: tuple[int, int]) -> str:
    step, number = place
    return f"backward {number + 1} in step {step + 1}"
