"""Every rank computes the same parties, pairs and rings, in any world and with any worker healing."""

from __future__ import annotations

import pytest

from bagua_core.communication.step_interface import StepPlan
from bagua_core.communication.topology.peer_selection import (
    Parties,
    PeerSelectionError,
    find_parties,
    peer_of,
    ring_neighbours,
    shift_one,
)


def plan(rank: int, size: int, healing: frozenset[int] = frozenset()) -> StepPlan:
    return StepPlan(1, 0, rank, size, healing)


def test_without_hierarchy_every_active_rank_is_a_party() -> None:
    nodes = ((0, 1), (2,), (3,))
    assert find_parties(nodes, plan(2, 4), False) == Parties((0, 1, 2, 3), 2, 1, False, True)
    healing = frozenset({1})
    assert find_parties(nodes, plan(2, 4, healing), False) == Parties((0, 2, 3), 1, 1, False, True)
    assert find_parties(nodes, plan(1, 4, healing), False) == Parties((0, 2, 3), None, 0, False, True)


def test_one_worker_a_node_is_the_flat_form() -> None:
    for nodes in ((), ((0,), (1,), (2,))):
        assert find_parties(nodes, plan(1, 3), True) == Parties((0, 1, 2), 1, 1, False, True)


def test_nodes_are_parties_as_long_as_one_of_their_workers_has_the_model() -> None:
    nodes = ((0, 1), (2, 3, 4), (5,))
    healing = frozenset({2, 3, 5})
    speaker, other = plan(2, 6, healing), plan(4, 6, healing)
    assert find_parties(nodes, speaker, True) == Parties((0, 1), 1, 1, True, True)  # it speaks for rank 4
    assert find_parties(nodes, other, True) == Parties((0, 1), 1, 1, True, False)
    assert find_parties(nodes, plan(5, 6, healing), True) == Parties((0, 1), None, 0, True, True)
    assert find_parties(nodes, plan(3, 6), True) == Parties((0, 1, 2), 1, 3, True, False)


@pytest.mark.parametrize("count", [2, 4, 6, 10])
def test_shift_one_of_even_counts_is_the_known_schedule(count: int) -> None:
    half = count // 2
    for number in range(3 * half):
        for index in range(half):
            assert shift_one(number, index, count) == (number + index) % half + half


@pytest.mark.parametrize("count", range(1, 12))
def test_shift_one_pairs_everyone_and_one_of_odd_counts_sits_out_in_turn(count: int) -> None:
    half = (count + 1) // 2
    met: set[tuple[int, int]] = set()
    sat_out = []
    for number in range(half):
        peers = [shift_one(number, i, count) for i in range(count)]
        for index, peer in enumerate(peers):
            if peer is None:
                sat_out.append(index)
            else:
                assert peer != index and peers[peer] == index
                met.add((index, peer))
    assert met == {(i, j) for i in range(count) for j in range(count) if (i < half) != (j < half)}
    assert sorted(sat_out) == (list(range(half)) if count % 2 else [])


def test_a_scripts_own_selection() -> None:
    def next_door(number: int, index: int, count: int) -> int | None:
        """0 1 | 2 3 | ..., then 0 | 1 2 | 3 ..."""
        peer = index + 1 if (index + number) % 2 == 0 else index - 1
        return peer if 0 <= peer < count else None

    assert [peer_of(next_door, 0, i, 3) for i in range(3)] == [1, 0, None]
    assert [peer_of(next_door, 1, i, 3) for i in range(3)] == [None, 2, 1]


@pytest.mark.parametrize(
    ("select", "text"),
    [
        (lambda number, i, count: (i + 1) % count, r"peer_selection\(7, 0, 3\) is 1, but for 1 it is 2"),
        (lambda number, i, count: 1 if i == 0 else None, r"is 1, but for 1 it is None"),
        (lambda number, i, count: i, r"is 0; return None or another index from 0 to 2"),
        (lambda number, i, count: 3 - i, r"is 3; return None or another index from 0 to 2"),
        (lambda number, i, count: True, r"is True; return None or another index"),
        (lambda number, i, count: 1.0, r"is 1.0; return None or another index"),
    ],
)
def test_a_selection_that_is_no_pairing_is_named_on_every_rank(select, text) -> None:  # type: ignore[no-untyped-def]
    for index in range(3):
        with pytest.raises(PeerSelectionError, match=text):
            peer_of(select, 7, index, 3)


def test_rings() -> None:
    assert [ring_neighbours(i, 4) for i in range(4)] == [(3, 1), (0, 2), (1, 3), (2, 0)]
    assert [ring_neighbours(i, 2) for i in range(2)] == [(1, 1), (0, 0)]
    assert ring_neighbours(0, 1) == (0, 0)
