"""Tables: the workers that are slow, the delay before a report, and that noise causes none."""

from __future__ import annotations

import pytest

from bagua_core.elastic.checks.stragglers import (
    UNKNOWN,
    ComputingTime,
    StragglerWatch,
    shard_share,
    slow_ranks,
)

WORKERS = "abc"


def ms(*values: float) -> list[int]:
    return [round(v * 1000) for v in values]


@pytest.mark.parametrize(
    ("computing_us", "slow"),
    [
        ([], []),
        (ms(100), []),
        (ms(100, 100, 100), []),
        (ms(100, 149, 100), []),
        (ms(100, 151, 100), [1]),
        # of two, the slow one is measured against the other, not against their mean
        (ms(100, 160), [1]),
        (ms(100, 300, 100, 500), [3, 1]),
        # a slow node of two; with more than half of the ranks slow they are what is usual
        (ms(100, 100, 200, 200), [2, 3]),
        (ms(100, 200, 200, 200), []),
        # too little to matter
        (ms(1.0, 2.9), []),
        (ms(0, 5), [1]),
        ([100_000, UNKNOWN, 100_000, 200_000], [3]),
        ([UNKNOWN, 200_000], []),
    ],
)
def test_slow_in_one_window(computing_us: list[int], slow: list[int]) -> None:
    assert [s.global_rank for s in slow_ranks(computing_us)] == slow


def test_mean_computing_time_is_what_was_not_waited() -> None:
    time = ComputingTime()
    assert time.take() == UNKNOWN
    time.step_done(lasted_s=1.0, waited_s=0.25)
    time.step_done(lasted_s=1.0, waited_s=0.75)
    assert time.take() == 500_000
    assert time.take() == UNKNOWN, "each window begins anew"
    time.step_done(1.0, 2.0)
    assert time.take() == 0
    time.step_done(1.0, 0.0)
    time.forget()
    assert time.take() == UNKNOWN


def test_a_worker_with_more_shards_is_no_slower_for_that() -> None:
    """Of 5 shards among four workers the first has 2 in each step; of five workers and 4 shards the last is idle."""
    found = []
    for own in (2, 1, 1, 1):
        time = ComputingTime()
        time.step_done(lasted_s=2.0, waited_s=2.0 - own, shard_share=shard_share(own, 5, 4))
        found.append(time.take())
    assert found == [1_250_000] * 4 and slow_ranks(found) == ()
    idle = ComputingTime()
    idle.step_done(lasted_s=1.0, waited_s=0.9, shard_share=shard_share(0, 4, 5))
    assert idle.take() == UNKNOWN
    assert shard_share(0, 0, 4) is None  # as in any job that is not deterministic


def test_named_once_after_three_windows_and_again_after_recovering() -> None:
    watch = StragglerWatch(windows=3)
    slow, even = ms(100, 200, 100), ms(100, 100, 100)
    told = [watch.observe(WORKERS, slow) for _ in range(6)]
    assert [[s.global_rank for s in f.named] for f in told] == [[], [], [1], [], [], []]
    assert [watch.observe(WORKERS, even).recovered for _ in range(4)] == [(), (), (1,), ()]
    assert [bool(watch.observe(WORKERS, slow).named) for _ in range(3)] == [False, False, True]


def test_single_slow_windows_are_not_told() -> None:
    watch = StragglerWatch(windows=2)
    for _ in range(5):
        assert watch.observe(WORKERS, ms(100, 900, 100)).named == ()
        assert watch.observe(WORKERS, ms(100, 100, 100)).named == ()


def test_counts_outlast_a_change_of_ranks() -> None:
    """A job whose members or settings change often names its straggler all the same, once."""
    watch = StragglerWatch(windows=3)
    assert watch.observe("abc", ms(100, 100, 200)).named == ()
    assert watch.observe("ac", ms(100, 200)).named == ()
    assert [s.global_rank for s in watch.observe("cad", ms(200, 100, 100)).named] == [0]
    assert watch.observe("ac", ms(100, 200)).named == (), "it was named before"
    told = [watch.observe(workers, ms(100, 100)).recovered for workers in ("ac", "ca", "ac")]
    assert told == [(), (), (1,)]


def test_counts_are_of_one_worker() -> None:
    watch = StragglerWatch(windows=2)
    watch.observe("ab", ms(100, 200))
    assert watch.observe("ac", ms(100, 200)).named == (), "rank 1 is another worker now"
    assert watch.observe("ab", ms(100, 200)).named == (), "it has left since"
    assert [s.global_rank for s in watch.observe("ab", ms(100, 200)).named] == [1]


def test_a_window_without_a_measurement_counts_for_nothing() -> None:
    watch = StragglerWatch(windows=2)
    slow, unknown = ms(100, 200, 100), [100_000, UNKNOWN, 100_000]
    assert watch.observe(WORKERS, slow).named == ()
    assert watch.observe(WORKERS, unknown).named == ()
    assert watch.observe(WORKERS, [UNKNOWN, 100_000, UNKNOWN]).named == ()
    assert [s.global_rank for s in watch.observe(WORKERS, slow).named] == [1]
    for window in (unknown, ms(100, 100, 100), unknown):
        assert watch.observe(WORKERS, window).recovered == ()
    assert watch.observe(WORKERS, ms(100, 100, 100)).recovered == (1,)


def test_all_ranks_come_to_the_same_conclusion() -> None:
    windows = [ms(100, 180, 90, 300), ms(100, 170, 95, 310), ms(105, 175, 95, 305)]
    watches = [StragglerWatch() for _ in range(4)]
    findings = [[watch.observe("abcd", w) for w in windows] for watch in watches]
    assert findings.count(findings[0]) == 4
    assert [s.global_rank for s in findings[0][-1].named] == [3, 1]


def test_what_is_said() -> None:
    (straggler,) = slow_ranks(ms(100, 250, 100))
    assert str(straggler) == (
        "global rank 1 is the slowest: it computes 0.25 s a step, the others 0.1 s (2.5 times), and they wait for it"
    )


@pytest.mark.parametrize(("slower_by", "windows"), [(1.0, 3), (1.5, 0)])
def test_settings_are_checked(slower_by: float, windows: int) -> None:
    with pytest.raises(ValueError, match="at least 1 window"):
        StragglerWatch(slower_by, windows)
