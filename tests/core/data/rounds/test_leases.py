"""Leases against histories: every place of an epoch is used once, whatever workers do with their leases."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bagua_core.communication.step_interface import MOST_LEASE_RANGES, Used
from bagua_core.data.rounds.leases import (
    MOST_MORE,
    LeaseBook,
    LeaseConflict,
    count_of,
    first_of,
    proportional,
)
from bagua_core.elastic.step.round_rows import from_row, to_row
from bagua_core.errors import PeerViolation

WORKERS = ("a", "b", "c", "d")
ROUNDS = st.lists(
    st.tuples(
        st.lists(st.sampled_from(WORKERS), min_size=1, max_size=4, unique=True),
        st.lists(st.floats(0, 1), min_size=4, max_size=4),  # the part of its lease that each uses
        st.lists(st.sampled_from([0.0, 1.0, 1.04, 3.0, 100.0]), min_size=4, max_size=4),  # speeds
    ),
    max_size=40,
)


@settings(max_examples=300)
@given(length=st.integers(1, 60), most=st.integers(1, 25), rounds=ROUNDS)
def test_each_place_of_an_epoch_is_used_once(length: int, most: int, rounds: Any) -> None:
    book, used_in_epoch = LeaseBook.of_epoch(length, 0), []
    for workers, parts, speeds in rounds:
        leases = book.lease(workers, most)
        assert all(len(lease) <= MOST_LEASE_RANGES for lease in leases)
        places = [p for lease in leases for start, stop in lease for p in range(start, stop)]
        assert len(places) == len(set(places)) <= (1 + MOST_MORE) * most
        if book.is_last(most):
            assert len(places) == count_of(book.unused) or max(map(len, leases)) == MOST_LEASE_RANGES
        used = [
            Used(first_of(lease, round(part * count_of(lease))), speed)
            for lease, part, speed in zip(leases, parts, speeds, strict=False)
        ]
        used = [from_row(to_row(one)) for one in used]
        used_in_epoch += [p for one in used for start, stop in one.ranges for p in range(start, stop)]
        epoch, book = book.epoch, book.closed(workers, used, most)
        assert len(used_in_epoch) == len(set(used_in_epoch))
        if book.epoch != epoch:
            assert sorted(used_in_epoch) == list(range(length))
            used_in_epoch = []


@pytest.mark.parametrize("confirms", [False, True])
def test_a_row_says_whether_the_round_is_to_be_confirmed(confirms: bool) -> None:
    for used in (Used((), 0.0, confirms), Used(((0, 4), (8, 9)), 2.5, confirms)):
        assert from_row(to_row(used)) == used


def test_leases_follow_speeds() -> None:
    book = LeaseBook.of_epoch(1000, 0)
    assert [count_of(lease) for lease in book.lease(["a", "b"], 80)] == [40, 40]
    book = book.closed(["a", "b"], [Used(((0, 40),), 30.0), Used(((40, 80),), 10.0)])
    leases = book.lease(["a", "b"], 80)
    assert [count_of(lease) for lease in leases] == [60, 20]
    again = book.closed(["a", "b"], [Used(leases[0], 30.0), Used(leases[1], 10.0)])
    assert [count_of(lease) for lease in again.lease(["a", "b"], 80)] == [60, 20]
    # one that is new counts as the others' mean, and one that took no step keeps its speed
    assert [count_of(lease) for lease in again.lease(["a", "b", "new"], 80)] == [40, 13, 27]
    assert book.closed(["a", "b"], [Used(), Used(leases[1], 10.0)]).speeds["a"] == 30.0


def test_a_speed_is_the_mean_of_rounds_until_it_jumps() -> None:
    book, speed = LeaseBook.of_epoch(1000, 0), []
    for now in (100.0, 120.0, 80.0, *[100.0] * 12, 40.0, 44.0):
        (lease,) = book.lease(["a"], 10)
        book = book.closed(["a"], [Used(lease, now)])
        speed.append(book.speeds["a"])
    assert speed[0] == 100.0
    assert all(abs(s - 100.0) < 10.0 for s in speed[1:15]) and abs(speed[14] - 100.0) < 1.0
    assert speed[15] == 40.0
    assert 40.0 < speed[16] < 44.0


def test_a_lost_lease_is_leased_again() -> None:
    book = LeaseBook.of_epoch(100, 0)
    lost, kept = book.lease(["a", "b"], 40)
    book = book.closed(["b"], [Used(kept, 1.0)])
    assert book.lease(["b"], 40) == [(*lost, (40, 60))]


def test_what_rounds_that_ended_early_left_is_dealt_in_turn() -> None:
    """One small range of each of many workers, in every round: no worker's row has too many ranges for it."""
    workers = [f"w{i}" for i in range(3 * MOST_LEASE_RANGES)]
    book = LeaseBook.of_epoch(100_000, 0)
    for number in range(12):
        leases = book.lease(workers, 100 * len(workers))
        assert [count_of(lease) for lease in leases] == [100] * len(workers)
        assert max(map(len, leases)) <= 3
        # the first to be done ends the round, and the others leave some samples
        used = [first_of(lease, 100 - (i + number) % 7) for i, lease in enumerate(leases)]
        book = book.closed(workers, [Used(ranges, 1.0) for ranges in used])


def test_rounds_have_the_samples_that_they_are_to_have_though_the_first_worker_ends_them() -> None:
    """The leases are longer by what is left of them. Without that, rounds would have 90 samples of 100."""
    book, counts = LeaseBook.of_epoch(10_000, 0), []
    for number in range(40):
        leases = book.lease(WORKERS, 100)
        # one is a tenth faster than was expected, each time another one
        parts = [1.0 if i == number % 4 else 1 / 1.15 for i in range(4)]
        used = [
            first_of(lease, int(part * count_of(lease))) for lease, part in zip(leases, parts, strict=True)
        ]
        counts.append(sum(map(count_of, used)))
        book = book.closed(WORKERS, [Used(ranges, 1.0) for ranges in used], 100)
    assert counts[0] < 91
    assert 97 < sum(counts[10:]) / 30 < 103
    assert book.stretch > 1.05
    for most in (0, 100):  # nothing was trained
        assert book.closed(WORKERS, [Used()] * 4, most).stretch == book.stretch


def test_an_epoch_ends_without_a_small_round() -> None:
    book = LeaseBook.of_epoch(100, 0)
    assert not book.is_last(79) and sum(map(count_of, book.lease(["a", "b"], 79))) == 79
    assert book.is_last(80) and sum(map(count_of, book.lease(["a", "b"], 80))) == 100


def test_no_worker_leases_a_lone_sample_where_another_can_take_it() -> None:
    assert [count_of(lease) for lease in LeaseBook.of_epoch(4, 0).lease(WORKERS, 9)] == [4, 0, 0, 0]
    assert [count_of(lease) for lease in LeaseBook.of_epoch(9, 0).lease(WORKERS, 9)] == [3, 2, 2, 2]
    assert [count_of(lease) for lease in LeaseBook.of_epoch(1, 0).lease(WORKERS, 9)] == [1, 0, 0, 0]


def test_places_cannot_be_used_twice() -> None:
    book = LeaseBook.of_epoch(100, 0)
    with pytest.raises(LeaseConflict, match="places 10 to 30"):
        book.closed(["a", "b"], [Used(((0, 20),)), Used(((10, 30),))])


@given(st.integers(0, 1000), st.lists(st.floats(0.01, 1000), min_size=1, max_size=6))
def test_shares_sum_to_the_whole(total: int, weights: list[float]) -> None:
    shares = proportional(total, weights)
    assert sum(shares) == total
    exact = [total * w / sum(weights) for w in weights]
    assert all(abs(share - e) < 1 for share, e in zip(shares, exact, strict=True))


@pytest.mark.parametrize(
    "row",
    [
        [9, 0, 0] + [0] * 16,
        [-1, 0, 0] + [0] * 16,
        [0, 0, 2] + [0] * 16,
        [1, 0, 0, 5, 5] + [0] * 14,
        [1, -1, 0, 0, 5] + [0] * 14,
        [1, 0, 0, 0, 5],
        [1],
    ],
)
def test_a_row_that_no_member_sends_is_refused(row: list[int]) -> None:
    with pytest.raises(PeerViolation):
        from_row(row)


def test_a_worker_that_was_slow_in_one_round_is_measured_again() -> None:
    """A pause makes it look a thousand times slower; without a sample it would keep that speed for ever."""
    book = LeaseBook.of_epoch(1000, 0)
    book = book.closed(["a", "b"], [Used(((0, 40),), 1000.0), Used(((40, 80),), 1.0)])
    leases = book.lease(["a", "b"], 80)
    assert [count_of(lease) for lease in leases] == [78, 2]
    book = book.closed(["a", "b"], [Used(leases[0], 1000.0), Used(leases[1], 1000.0)])
    assert [count_of(lease) for lease in book.lease(["a", "b"], 80)] == [40, 40]
