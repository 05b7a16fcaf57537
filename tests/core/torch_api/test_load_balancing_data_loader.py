"""The original's samplers: like complexity at the same time, the same number of batches on every replica."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from bagua_core.torch_api import contrib
from bagua_core.torch_api.contrib.load_balancing_data_loader import (
    LoadBalancingDistributedBatchSampler,
    LoadBalancingDistributedSampler,
)


def lengths_of(count: int) -> list[int]:
    numbers = random.Random(count)
    return [int(numbers.lognormvariate(4, 1)) + 1 for _ in range(count)]


def samplers(data: list[int], replicas: int, **more: Any) -> list[LoadBalancingDistributedSampler]:
    return [LoadBalancingDistributedSampler(data, float, replicas, rank, **more) for rank in range(replicas)]


def test_both_names() -> None:
    assert contrib.LoadBalancingDistributedSampler is LoadBalancingDistributedSampler
    assert contrib.LoadBalancingDistributedBatchSampler is LoadBalancingDistributedBatchSampler


@settings(max_examples=200)
@given(
    data=st.lists(st.integers(0, 100), min_size=1, max_size=50),
    replicas=st.integers(1, 7),
    shuffle=st.booleans(),
    drop_last=st.booleans(),
    random_level=st.sampled_from([0, 0.3, 1.0]),
    epoch=st.integers(0, 3),
)
def test_all_samples_are_dealt_out(
    data: list[int], replicas: int, shuffle: bool, drop_last: bool, random_level: float, epoch: int
) -> None:
    of_all = samplers(data, replicas, shuffle=shuffle, drop_last=drop_last, random_level=random_level)
    for sampler in of_all:
        sampler.set_epoch(epoch)
    drawn = [list(sampler) for sampler in of_all]
    expected = len(data) // replicas if drop_last else -(-len(data) // replicas)
    assert {len(d) for d in drawn} == {len(s) for s in of_all} == {expected}
    used = Counter(i for d in drawn for i in d)
    if drop_last:
        assert set(used.values()) <= {1} and len(used) == expected * replicas
    else:
        assert set(used) == set(range(len(data)))
        assert used.total() == expected * replicas
        if len(data) > replicas:
            rows = list(zip(*drawn, strict=True))
            assert max(used.values()) <= 2 and all(len(set(row)) == replicas for row in rows)


def test_replicas_draw_like_complexity_at_the_same_time() -> None:
    data = lengths_of(4000)

    def gaps(**more: Any) -> float:
        drawn = [[data[i] for i in sampler] for sampler in samplers(data, 4, **more)]
        return sum(max(row) - min(row) for row in zip(*drawn, strict=True)) / 1000

    assert gaps() < 3 < 20 < gaps(random_level=0.1) < gaps(random_level=1.0)


def test_epochs_differ_only_when_told_and_no_replica_is_always_the_slowest() -> None:
    data = lengths_of(400)
    first, second = samplers(data, 2)
    orders = []
    for epoch in (0, 0, 1):
        first.set_epoch(epoch)
        orders.append(list(first))
    assert orders[0] == orders[1] != orders[2]
    first.set_epoch(0)
    larger = sum(data[a] > data[b] for a, b in zip(first, second, strict=True))
    smaller = sum(data[a] < data[b] for a, b in zip(first, second, strict=True))
    assert min(larger, smaller) > 0.3 * (larger + smaller)
    fixed = samplers(data, 2, shuffle=False)[0]
    order = list(fixed)
    fixed.set_epoch(5)
    assert list(fixed) == order and [data[i] for i in order] == sorted(data[i] for i in order)


def test_complexities_are_computed_lazily_and_once() -> None:
    asked: list[int] = []

    def complexity(sample: int) -> int:
        asked.append(sample)
        return sample

    data = lengths_of(50)
    sampler = LoadBalancingDistributedSampler(data, complexity, 2, 0)
    assert asked == [] and len(sampler) == 25
    for epoch in range(3):
        sampler.set_epoch(epoch)
        list(sampler)
    assert asked == data


def by_tokens(data: list[int], most: int) -> Any:
    def batches(indices: list[int]) -> list[list[int]]:
        made: list[list[int]] = [[]]
        for index in indices:
            if made[-1] and sum(data[i] for i in made[-1]) + data[index] > most:
                made.append([])
            made[-1].append(index)
        return made

    return batches


@pytest.mark.parametrize("drop_last", [False, True])
def test_every_replica_has_as_many_batches_of_the_scripts_own(drop_last: bool) -> None:
    data = lengths_of(301)
    make = by_tokens(data, 300)
    of_all = samplers(data, 3, random_level=1.0)
    batches = [LoadBalancingDistributedBatchSampler(s, make, drop_last) for s in of_all]
    drawn = [list(b) for b in batches]
    counts = [len(make(list(s))) for s in of_all]
    expected = min(counts) if drop_last else max(counts)
    assert len(set(counts)) > 1, "or nothing is shown"
    assert [len(d) for d in drawn] == [len(b) for b in batches] == [expected] * 3
    for sampler, own in zip(of_all, drawn, strict=True):
        assert own[: min(counts)] == make(list(sampler))[: min(counts)]
    if not drop_last:
        assert {i for own in drawn for batch in own for i in batch} == set(range(301))


def test_batches_are_used_again_as_often_as_it_takes() -> None:
    """Also where one replica makes more than twice as many as another."""

    def uneven(indices: list[int]) -> list[list[int]]:
        return [[i] for i in indices] if 0 in indices else [indices]

    of_all = samplers([5, 1, 1, 1, 1, 1, 1, 1], 2, shuffle=False)
    counts = {len(list(LoadBalancingDistributedBatchSampler(s, uneven))) for s in of_all}
    assert counts == {4}


@settings(max_examples=100)
@given(
    data=st.lists(st.integers(1, 100), min_size=1, max_size=60),
    replicas=st.integers(1, 4),
    budget=st.integers(1, 200),
    most=st.none() | st.integers(1, 6),
    drop_last=st.booleans(),
)
def test_a_budget_uses_every_sample_within_its_bounds(
    data: list[int], replicas: int, budget: int, most: int | None, drop_last: bool
) -> None:
    drawn = [
        list(LoadBalancingDistributedBatchSampler(s, budget=budget, max_batch_size=most, drop_last=drop_last))
        for s in samplers(data, replicas)
    ]
    assert len({len(d) for d in drawn}) == 1
    used = Counter(i for d in drawn for batch in d for i in batch)
    for step in zip(*drawn, strict=True):
        samples = {i for batch in step for i in batch}
        assert all(batch and (most is None or len(batch) <= most) for batch in step)
        assert sum(data[i] for i in samples) <= budget * replicas or len(samples) == 1
        if len(samples) >= replicas:
            assert sum(map(len, step)) == len(samples), "nothing is used twice where there is enough"
        else:
            assert not drop_last
    if not drop_last:
        assert set(used) == set(range(len(data)))


def test_a_budget_gives_replicas_equal_work() -> None:
    data = lengths_of(4000)
    drawn = [list(LoadBalancingDistributedBatchSampler(s, budget=2000)) for s in samplers(data, 4)]
    sums = [[sum(data[i] for i in batch) for batch in step] for step in zip(*drawn, strict=True)]
    assert sum(max(s) * 4 / sum(s) for s in sums) / len(sums) < 1.02


def test_in_torchs_loader() -> None:
    data = lengths_of(40)
    sampler = LoadBalancingDistributedSampler(data, float)
    assert (sampler.num_replicas, sampler.rank) == (1, 0), "no launcher, no process group"
    batches = LoadBalancingDistributedBatchSampler(sampler, budget=300.0, max_batch_size=8)
    drawn = [batch.tolist() for batch in DataLoader(data, batch_sampler=batches, num_workers=2)]
    assert sorted(value for batch in drawn for value in batch) == sorted(data)
    assert sorted(DataLoader(data, sampler=sampler, batch_size=None)) == sorted(data)


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (
            lambda s: LoadBalancingDistributedSampler([1], float, 2, 2),
            ValueError,
            "rank=2 is not among num_replicas=2",
        ),
        (lambda s: LoadBalancingDistributedSampler([1], float, 0, 0), ValueError, "num_replicas=0"),
        (lambda s: LoadBalancingDistributedSampler([1], float, random_level=2), ValueError, "random_level=2"),
        (lambda s: LoadBalancingDistributedSampler([1]), TypeError, "complexity_fn or complexities"),
        (lambda s: LoadBalancingDistributedBatchSampler([1], list), TypeError, r"sampler=\[1\]"),
        (lambda s: LoadBalancingDistributedBatchSampler(s), TypeError, "batch_fn or budget"),
        (lambda s: LoadBalancingDistributedBatchSampler(s, list, budget=1), TypeError, "not both"),
        (lambda s: LoadBalancingDistributedBatchSampler(s, budget=0), ValueError, "budget=0"),
        (
            lambda s: LoadBalancingDistributedBatchSampler(s, budget=1, max_batch_size=0),
            ValueError,
            "max_batch_size=0",
        ),
        (lambda s: list(LoadBalancingDistributedBatchSampler(s, lambda i: [])), None, ""),
        (
            lambda s: list(LoadBalancingDistributedBatchSampler(s, lambda i: [i] if 0 in i else [])),
            ValueError,
            "batch_fn made no batch for replica",
        ),
    ],
)
def test_what_makes_no_sense_is_refused(make: Any, error: type[Exception] | None, words: str) -> None:
    sampler = samplers(lengths_of(10), 2)[0]
    if error is None:
        assert make(sampler) == []
        return
    with pytest.raises(error, match=words):
        make(sampler)
