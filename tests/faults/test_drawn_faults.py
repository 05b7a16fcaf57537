"""A drawn sequence of faults has every kind, never the last worker, and is the same for a seed."""

from __future__ import annotations

from itertools import pairwise

import pytest

from tests.faults.drawn_faults import (
    FIRST_WORKERS,
    JOINS,
    LEAST_FAULTS,
    LEAVES,
    MOST_NODES,
    MOST_WORKERS,
    Kind,
    draw,
    in_words,
)

SEEDS = range(200)


@pytest.mark.parametrize("count", [LEAST_FAULTS, 20])
def test_each_kind_comes_and_a_worker_always_stays(count: int) -> None:
    for seed in SEEDS:
        faults = draw(seed, count)
        assert len(faults) == count and {f.kind for f in faults} == set(Kind), in_words(seed, faults)
        workers = {0: FIRST_WORKERS}
        for fault in faults:
            before = sum(workers.values())
            if fault.kind in JOINS:
                assert fault.node not in workers
                workers[fault.node] = fault.world - before
                assert workers[fault.node] in (1, 2)
            elif fault.kind in LEAVES:
                del workers[fault.node]
            elif fault.kind is not Kind.ETCD_AWAY:
                assert fault.slot < workers[fault.node] and before > 1
            assert sum(workers.values()) == fault.world <= MOST_WORKERS, in_words(seed, faults)
            assert 1 <= len(workers) <= MOST_NODES


def test_a_seed_repeats_its_faults_and_others_differ() -> None:
    drawn = [tuple(draw(seed)) for seed in SEEDS]
    assert drawn == [tuple(draw(seed)) for seed in SEEDS]
    assert len(set(drawn)) > len(drawn) / 2
    assert draw(1, 20)[:10] == draw(1, 10), "a longer sequence begins with the shorter one"
    kinds = [[fault.kind for fault in faults] for faults in drawn]
    assert {pair for each in kinds for pair in pairwise(each)} >= {
        (Kind.NODE_KILLED, Kind.WORKER_KILLED), (Kind.WORKER_KILLED, Kind.LEAVE), (Kind.LEAVE, Kind.JOIN)
    }  # fmt: skip


def test_the_words_name_the_seed_and_each_fault() -> None:
    words = in_words(3, draw(3))
    assert words.startswith("seed 3: node ") and words.count("node ") == LEAST_FAULTS
