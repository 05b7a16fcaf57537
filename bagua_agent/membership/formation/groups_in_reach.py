"""Finds groups of workers whose hosts all reach each other, in a fixed order. Pure; hosts are numbers here.

To find such a group is the search for a clique, which takes exponential time in the worst case. A dead end is a choice
of hosts that the hosts behind it can't complete; MOST_DEAD_ENDS of them are looked at in one call. From then on a
group is looked for without backtracking, as in a graph without dead ends: a group may be missed then, and every
group that is found is one.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass

MOST_DEAD_ENDS = 500


@dataclass(slots=True)
class _Choice:
    """The choice of the next host of a group."""

    hosts: list[int]  # that reach all hosts chosen before
    needed: int  # workers that the group lacks
    left: int  # workers of the hosts not tried yet
    is_whole: bool  # the host chosen last cuts off none of those not tried before it
    tried: int = 0  # hosts at the beginning of `hosts`


def groups_in_reach(
    workers: Sequence[int], cut_off: Sequence[Set[int]], size: int, most_dead_ends: int = MOST_DEAD_ENDS
) -> list[list[int]]:
    """Returns groups of `size` workers, each as the hosts of its workers, ascending. A group is the first one, in
    lexicographic order, that can be formed of the workers without one; but see MOST_DEAD_ENDS.

    workers: how many each host has. cut_off: for each host, those that it can't share a group with; symmetric.
    """
    left = list(workers)
    found: list[list[int]] = []
    dead_ends = most_dead_ends
    while True:
        hosts, dead_ends = _first_hosts(left, cut_off, size, dead_ends)
        if not hosts:
            return found
        group: list[int] = []
        for host in hosts:
            taken = min(left[host], size - len(group))
            left[host] -= taken
            group += [host] * taken
        found.append(group)


def _first_hosts(
    workers: Sequence[int], cut_off: Sequence[Set[int]], size: int, dead_ends: int
) -> tuple[list[int], int]:
    """Returns the hosts of the first group, none if there is none; and the dead ends that may still be looked at. A
    chosen host gives all its workers that are needed: another one of the same host never makes a group harder to
    complete."""
    hosts = [host for host, count in enumerate(workers) if count]
    choices = [_Choice(hosts, size, sum(workers), is_whole=False)]
    chosen: list[int] = []
    while choices:
        choice = choices[-1]
        if choice.left < choice.needed:
            dead_ends -= 1
            if dead_ends < 0 and len(choices) > 1:
                del choices[1:], chosen[:]
                continue
            choices.pop()
            del chosen[-1:]
            if choice.is_whole:
                choices[-1].left = 0  # without that host there are fewer workers and no more ways
            continue
        host = choice.hosts[choice.tried]
        choice.tried += 1
        choice.left -= workers[host]
        if workers[host] >= choice.needed:
            return [*chosen, host], dead_ends
        after = choice.hosts[choice.tried :]
        reached = [other for other in after if other not in cut_off[host]]
        is_whole = len(reached) == len(after)
        left = choice.left if is_whole else sum(workers[other] for other in reached)
        chosen.append(host)
        choices.append(_Choice(reached, choice.needed - workers[host], left, is_whole))
    return [], dead_ends
