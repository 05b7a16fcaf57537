"""Allowed sizes, start size and cooldown: what each combination permits, and why nodes wait."""

from __future__ import annotations

import itertools

import pytest

from bagua_agent.base.sizes import ANY_SIZE, Groups, SizePolicy, nodes_with_a_part, whole_replicas

ALLOWED = SizePolicy((2, 4, 8))


@pytest.mark.parametrize(
    ("nodes", "wanted", "fit", "above"),
    [
        (1, (2, 8), 1, 2),  # below the least: the minimum decides
        (2, (2, 8), 2, 4),
        (3, (2, 8), 2, 4),
        (4, (2, 8), 4, 8),
        (7, (2, 8), 4, 8),
        (8, (2, 8), 8, None),
        (9, (2, 8), 8, None),
        (8, (2, 4), 4, None),
        (3, (2, 2), 2, None),
        (3, (4, 4), 2, 4),  # the minimum was raised above the generation
        (3, (1, 3), 2, None),  # of a client that checks no sizes: within its range they hold
        (5, (1, 7), 4, None),
        (3, (3, 3), 3, None),  # and where the range has none, it counts as it is
    ],
)
def test_the_size_of_so_many_nodes(nodes: int, wanted: tuple[int, int], fit: int, above: int | None) -> None:
    room = ALLOWED.room(*wanted)
    assert (room.fit(nodes), room.next_above(nodes)) == (fit, above)


def test_groups_allow_the_numbers_of_nodes_that_hold_whole_replicas() -> None:
    groups = SizePolicy(groups=Groups(3, slots=2))
    room = groups.room(2, 7)
    assert [room.fit(n) for n in range(1, 9)] == [1, 2, 3, 3, 5, 6, 6, 6]
    assert [room.next_above(n) for n in range(8)] == [2, 2, 3, 5, 5, 6, None, None]
    assert room.limited and room.awaits(3, 1) == (
        "waiting for 1 more node to train on 5 (allowed sizes: 2, 3, 5, 6, ...); "
    )
    assert groups.room(4, 4).fit(4) == 4, "a range without a whole replica counts as it is"
    assert groups.forbidden(2, 5, 4) == 4
    for slots in (0, 3, 4):
        with pytest.raises(ValueError, match="no several nodes"):
            Groups(3, slots)


def test_without_sizes_each_number_up_to_the_maximum_is_one() -> None:
    room = ANY_SIZE.room(1, 4)
    assert [room.fit(n) for n in range(1, 6)] == [1, 2, 3, 4, 4]
    assert [room.next_above(n) for n in range(1, 6)] == [2, 3, 4, None, None]
    assert room.awaits(2, 1) == "", "nothing is awaited that has a place"
    assert ANY_SIZE.forbidden(1, 3, 7) is None and ANY_SIZE.bounds(1, 7) == (1, 7)


@pytest.mark.parametrize(
    ("wanted", "bounds"), [((2, 8), (2, 8)), ((1, 7), (2, 4)), ((3, 5), (4, 4)), ((3, 3), (3, 3))]
)
def test_a_range_is_moved_inwards_to_allowed_sizes(wanted: tuple[int, int], bounds: tuple[int, int]) -> None:
    assert ALLOWED.bounds(*wanted) == bounds


@pytest.mark.parametrize(
    ("nodes", "spares", "said"),
    [
        (2, 1, "waiting for 1 more node to train on 4 (allowed sizes: 2, 4, 8); "),
        (4, 2, "waiting for 2 more nodes to train on 8 (allowed sizes: 2, 4, 8); "),
        (2, 0, ""),  # no node waits
        (2, 2, ""),  # they join
        (8, 1, ""),  # above the maximum
    ],
)
def test_why_ready_nodes_are_spare(nodes: int, spares: int, said: str) -> None:
    assert ALLOWED.room(2, 8).awaits(nodes, spares) == said


def test_the_cooldown_tells_the_seconds_that_are_left() -> None:
    assert SizePolicy(cooldown_s=30.0).waits("adds n3") == (
        "waiting for the cooldown of 30 s since the last change (adds n3); "
    )


@pytest.mark.parametrize(("start", "least"), [(0, 2), (2, 2), (4, 4), (8, 8)])
def test_the_first_generation_needs_the_start_size(start: int, least: int) -> None:
    assert SizePolicy((2, 4, 8), start).least_to_start(2, 8) == least


def test_a_start_size_above_what_is_wanted_by_now_does_not_stop_the_job() -> None:
    assert SizePolicy((2, 4, 8), 8).least_to_start(2, 4) == 4


@pytest.mark.parametrize(("nodes", "first"), [((2, 8), None), ((3, 8), 3), ((2, 5), 5), ((1, 9), 1)])
def test_the_first_forbidden_number(nodes: tuple[int, int], first: int | None) -> None:
    assert ALLOWED.forbidden(*nodes) == first


@pytest.mark.parametrize(
    ("sizes", "start", "cooldown_s", "said"),
    [
        ((4, 2), 0, 0.0, "ascending"),
        ((2, 2), 0, 0.0, "ascending"),
        ((0, 2), 0, 0.0, "from 1 on"),
        ((2, 4), 3, 0.0, "start size 3 is not an allowed size"),
        ((), 0, -1.0, "cooldown"),
        ((), 0, float("nan"), "cooldown"),
        ((), 0, float("inf"), "cooldown"),
    ],
)
def test_what_is_no_policy(sizes: tuple[int, ...], start: int, cooldown_s: float, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        SizePolicy(sizes, start, cooldown_s)


def test_the_numbers_of_nodes_next_to_one_that_all_have_a_part_of_a_replica() -> None:
    for size, slots, nodes in itertools.product(range(1, 8), range(1, 5), range(1, 20)):
        whole = [n for n in range(nodes + size + 1) if nodes_with_a_part(n, slots, size) == n]
        nearest = max(n for n in whole if n <= nodes), min(n for n in whole if n >= nodes)
        assert whole_replicas(nodes, slots, size) == nearest, (size, slots, nodes)
