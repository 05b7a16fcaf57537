"""Divides a batch so that all workers take the same time. Pure arithmetic over costs.

The costliest sample goes first, to the worker with the least work; then exchanges between the most and the
least loaded. Plain Python floats in a fixed order: every machine computes the same shares from the same costs.
Invariants: shares are disjoint and cover the batch; their sizes keep the bounds; the largest sum is at most that of the
even split, and without bounds at most the mean plus the largest cost.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Sequence

from bagua_core.data.partition import share

NEAR_ENOUGH = 1e-3  # of the mean: exchanging further gains less than a clock can tell
_MOST_EXCHANGES = 256
_PARTNERS = 4  # the least loaded are tried in turn


def fair_shares(
    costs: Sequence[float], parts: int, *, least: int = 0, most: int | None = None
) -> list[list[int]]:
    """Returns the places 0..len(costs)-1 by part, ascending within each.

    costs: of each sample, at least 0, any unit. least, most: bounds on the samples of a part.
    Raises ValueError if no split keeps the bounds.
    """
    count = len(costs)
    most = count if most is None else most
    if least * parts > count or most * parts < count:
        raise ValueError(f"{count} samples do not go into {parts} parts of {least} to {most}")
    even = [list(share(count, parts, part)) for part in range(parts)]
    if parts == 1 or count <= parts:
        return even  # one sample each at most: nothing to choose
    shares = _longest_first(costs, parts, least, most)
    loads = [_sum_of(costs, places) for places in shares]
    _exchange(costs, shares, loads, least, most)
    if max(_sum_of(costs, places) for places in even) < max(_sum_of(costs, places) for places in shares):
        shares = even
    return [sorted(places) for places in shares]


def _sum_of(costs: Sequence[float], places: Sequence[int]) -> float:
    # not sum(): from Python 3.12 on it rounds otherwise
    total = 0.0
    for place in places:
        total += costs[place]
    return total


def _longest_first(costs: Sequence[float], parts: int, least: int, most: int) -> list[list[int]]:
    shares: list[list[int]] = [[] for _ in range(parts)]
    order = sorted(range(len(costs)), key=lambda place: (-costs[place], place))
    # by size after load: samples that cost nothing are dealt out too
    heap = [(0.0, 0, part) for part in range(parts)]
    owed = least * parts
    for done, place in enumerate(order):
        load, size, part = heapq.heappop(heap)
        while size >= most or (len(order) - done == owed and size >= least):
            load, size, part = heapq.heappop(heap)  # it is full, or what is left is owed to others
        shares[part].append(place)
        owed -= size < least
        heapq.heappush(heap, (load + costs[place], size + 1, part))
    return shares


def _exchange(
    costs: Sequence[float], shares: list[list[int]], loads: list[float], least: int, most: int
) -> None:
    near_enough = NEAR_ENOUGH * _sum_of(loads, range(len(loads))) / len(loads)
    for _ in range(_MOST_EXCHANGES):
        high = max(range(len(loads)), key=lambda part: (loads[part], -part))
        partners = heapq.nsmallest(_PARTNERS, range(len(loads)), key=lambda part: (loads[part], part))
        if loads[high] - loads[partners[0]] <= near_enough:
            return
        for low in partners:
            if low != high and _improve(costs, shares, loads, high, low, least, most):
                break
        else:
            return


def _improve(
    costs: Sequence[float],
    shares: list[list[int]],
    loads: list[float],
    high: int,
    low: int,
    least: int,
    most: int,
) -> bool:
    """Brings the loads of two parts nearer to each other: moves one sample or exchanges two. Returns False if neither
    does."""
    gap = loads[high] - loads[low]
    given, taken = shares[high], shares[low]
    wanted, best = gap / 2, gap * 1e-9
    choice: tuple[int, int | None] | None = None
    if len(given) > least and len(taken) < most:
        for place in given:
            gain = min(costs[place], gap - costs[place])
            if gain > best:
                best, choice = gain, (place, None)
    ranked = sorted(taken, key=lambda place: (costs[place], place))
    keys = [costs[place] for place in ranked]
    for place in given:
        at = bisect_left(keys, costs[place] - wanted)
        for near in (at - 1, at):
            if 0 <= near < len(ranked):
                moved = costs[place] - keys[near]
                gain = min(moved, gap - moved)
                if gain > best:
                    best, choice = gain, (place, ranked[near])
    if choice is None:
        return False
    place, other = choice
    given.remove(place)
    taken.append(place)
    moved = costs[place]
    if other is not None:
        taken.remove(other)
        given.append(other)
        moved -= costs[other]
    loads[high] -= moved
    loads[low] += moved
    return True
