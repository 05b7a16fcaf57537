"""Groups of workers whose hosts reach each other, compared with a search of all combinations."""

from __future__ import annotations

import random
from itertools import combinations

import pytest

from bagua_agent.membership.formation import groups_in_reach as module
from bagua_agent.membership.formation.groups_in_reach import groups_in_reach


def symmetric(hosts: int, *pairs: tuple[int, int]) -> list[set[int]]:
    cut_off: list[set[int]] = [set() for _ in range(hosts)]
    for one, other in pairs:
        cut_off[one].add(other)
        cut_off[other].add(one)
    return cut_off


def reach(group: list[int], cut_off: list[set[int]]) -> bool:
    return not any(other in cut_off[one] for one in group for other in group)


def of_all_combinations(workers: list[int], cut_off: list[set[int]], size: int) -> list[list[int]]:
    left, found = [host for host, count in enumerate(workers) for _ in range(count)], []
    while group := next((list(c) for c in combinations(left, size) if reach(list(c), cut_off)), None):
        found.append(group)
        for host in group:
            left.remove(host)
    return found


def drawn(hosts: int, share: float, rng: random.Random) -> list[set[int]]:
    return symmetric(hosts, *(pair for pair in combinations(range(hosts), 2) if rng.random() < share))


def test_a_group_is_the_first_combination_whose_hosts_reach_each_other() -> None:
    rng = random.Random(7)
    backtracked = 0
    for _ in range(300):
        workers = [rng.randint(1, 2) for _ in range(rng.randint(4, 8))]
        cut_off, size = drawn(len(workers), rng.choice((0.1, 0.3, 0.6)), rng), rng.randint(3, 5)
        expected = of_all_combinations(workers, cut_off, size)
        assert groups_in_reach(workers, cut_off, size) == expected
        backtracked += groups_in_reach(workers, cut_off, size, most_dead_ends=0) != expected
    assert backtracked > 10, "too few of them have a dead end before a group"


def test_without_a_dead_end_left_it_still_finds_groups() -> None:
    cut_off = symmetric(5, (1, 2), (1, 3), (1, 4))
    assert groups_in_reach([1] * 5, cut_off, 3) == [[0, 2, 3]]
    assert groups_in_reach([1] * 5, cut_off, 3, most_dead_ends=0) == [[2, 3, 4]]


@pytest.mark.parametrize("size", [3, 33, 270])
@pytest.mark.parametrize("how", ["pairs", "half", "random", "most"])
def test_many_hosts_are_looked_at_a_bounded_number_of_times(
    how: str, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    hosts, choices = 64, 0

    class Counted(module._Choice):
        def __init__(self, *arguments: object, **named: object) -> None:
            nonlocal choices
            choices += 1
            super().__init__(*arguments, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(module, "_Choice", Counted)
    cut_off = {
        "pairs": symmetric(hosts, *((i, i + 1) for i in range(0, hosts, 2))),
        "half": symmetric(hosts, *((i, j) for i in range(32) for j in range(32, 64))),
        "random": drawn(hosts, 0.3, random.Random(1)),
        "most": drawn(hosts, 0.9, random.Random(2)),
    }[how]
    workers = [min(8, size - 1)] * hosts
    found = groups_in_reach(workers, cut_off, size)
    assert all(len(group) == size and reach(group, cut_off) for group in found)
    assert choices < (module.MOST_DEAD_ENDS + hosts + len(found)) * hosts
