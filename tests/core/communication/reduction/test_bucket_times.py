"""The time of a bucket's sum on the network is measured in a few backwards of each generation."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from bagua_core.communication.communicator import AbortFlag, Communicator
from bagua_core.communication.pending import DonePending, WakeablePending
from bagua_core.communication.reduction import bucket_times
from bagua_core.communication.reduction.bucket_times import PAUSE, SKIPPED, WATCHED, BucketTimes
from bagua_core.communication.reduction.reducer import Reducer
from tests.core.communication.worlds import FakeEngine, gloo_world, run_ranks


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 100.0
        monkeypatch.setattr(bucket_times.time, "monotonic", lambda: self.now_s)


class Finishes(WakeablePending):
    """Ends when the test says so."""

    def __init__(self) -> None:
        super().__init__(AbortFlag())

    def _call_when_done(self, wake: object) -> None:
        self.end = wake

    def _collect(self) -> None: ...

    def is_done(self) -> bool:
        return False


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def backward(times: BucketTimes, clock: Clock, *sums: tuple[int, float, float]) -> None:
    """sums: bytes, moments of launch and end."""
    times.backward_begins()
    if not times.is_watching:
        return
    begun = clock.now_s
    pendings = []
    for size, launched_s, _ in sums:
        clock.now_s = begun + launched_s
        pendings.append(Finishes())
        times.launched(pendings[-1], size)
    for pending, (_, _, ended_s) in zip(pendings, sums, strict=True):
        clock.now_s = begun + ended_s
        pending.end(None)  # type: ignore[operator]


def test_a_bucket_waits_for_the_network_that_another_uses(clock: Clock) -> None:
    times = BucketTimes()
    for _ in range(SKIPPED + WATCHED + 1):
        assert times.found == ()
        backward(times, clock, (1000, 0.0, 2.0), (3000, 1.0, 8.0), (500, 9.0, 10.0))
    expected = [(1000, 2.0), (3000, 6.0), (500, 1.0)]
    assert [size for size, _ in times.found] == [size for size, _ in expected]
    assert [took for _, took in times.found] == pytest.approx([took for _, took in expected])


def test_sums_that_share_the_network_share_its_time_whichever_ends_first(clock: Clock) -> None:
    """One that ends beside another takes no time of its own: 4 s for 2,000 bytes, in all backwards."""
    times = BucketTimes()
    for number in range(SKIPPED + WATCHED + 1):
        first, second = (3.9, 4.0) if number % 2 else (4.0, 3.9)
        backward(times, clock, (500, 0.0, first), (1500, 0.5, second))
    assert times.found == ((500, pytest.approx(1.0)), (1500, pytest.approx(3.0)))


def test_a_bucket_of_empty_tensors_takes_no_time(clock: Clock) -> None:
    times = BucketTimes()
    for _ in range(SKIPPED + WATCHED + 1):
        backward(times, clock, (0, 0.0, 1.0))
    assert times.found == ((0, 0.0),)


def test_the_shortest_of_several_backwards_counts(clock: Clock) -> None:
    times = BucketTimes()
    for took in (9.0, 9.0, 3.0, 2.0, 5.0, 4.0, 9.0):
        backward(times, clock, (1000, 0.0, took))
    assert times.found == ((1000, pytest.approx(2.0)),)


def test_a_network_that_becomes_slower_is_measured_again(clock: Clock) -> None:
    times = BucketTimes()
    for _ in range(SKIPPED + WATCHED + PAUSE):
        backward(times, clock, (1000, 0.0, 2.0))
    assert times.found == ((1000, pytest.approx(2.0)),)
    for number in range(WATCHED + 1):
        assert times.found == ((1000, pytest.approx(2.0)),), f"backward {number}"
        backward(times, clock, (1000, 0.0, 20.0))
    assert times.found == ((1000, pytest.approx(20.0)),)


def test_an_operation_that_never_ended_says_nothing(clock: Clock) -> None:
    times = BucketTimes()
    for number in range(SKIPPED + WATCHED + 1):
        times.backward_begins()
        if times.is_watching:
            times.launched(Finishes(), 64)
            if number == SKIPPED:
                times.begin_generation()
    assert times.found == ()


def test_a_transport_that_does_not_call_back_is_not_measured() -> None:
    times = BucketTimes()
    for _ in range(SKIPPED + WATCHED + 1):
        times.backward_begins()
        times.launched(DonePending(), 64)
    assert times.found == ()


def test_a_reducer_measures_its_own_buckets() -> None:
    def train(communicator: Communicator) -> tuple[tuple[int, float], ...]:
        model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False))
        reducer = Reducer(model.parameters(), FakeEngine(communicator), bucket_cap_bytes=1024)
        for _ in range(SKIPPED + WATCHED + 1):
            model(torch.ones(1, 64)).sum().backward()
        return reducer.bucket_times

    for found in run_ranks(gloo_world(2), train):
        assert len(found) == 2 and found[0][0] >= 64 * 64 * 4
        assert all(took > 0 for _, took in found)
