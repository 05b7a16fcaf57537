"""Chooses the slots of a node for a unit: neighbours where possible, since they share links and memory."""

from __future__ import annotations

from collections.abc import Collection


def choose(free: Collection[int], count: int) -> tuple[int, ...] | None:
    """Returns `count` of the free places, in order; None: there are not so many.

    Chooses the shortest run of neighbours that is long enough, so that long runs stay whole; without one the lowest
    places.
    """
    if count > len(free):
        return None
    runs: list[list[int]] = []
    for slot in sorted(free):
        if runs and runs[-1][-1] == slot - 1:
            runs[-1].append(slot)
        else:
            runs.append([slot])
    long_enough = [run for run in runs if len(run) >= count]
    best = min(long_enough, key=len) if long_enough else sorted(free)
    return tuple(best[:count])
