"""Balanced work in an elastic job: nothing twice, nothing lost, and all agree on what is whose, whatever happens."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bagua_core.communication.step_interface import StepPlan
from bagua_core.data.balancing.balance import Balance
from bagua_core.data.elastic_loader import ElasticDataLoader
from bagua_core.data.partition import share
from tests.core.data.balanced_job import BalancedEngine, BalancedJob
from tests.core.data.fake_job import HISTORIES
from tests.core.data.test_elastic_loader import Numbers, as_list


def complexities_of(length: int, seed: int = 0) -> list[float]:
    numbers = random.Random(seed)
    return [float(min(50, int(numbers.paretovariate(1.0)))) for _ in range(length)]


def make_loader(
    engine: BalancedEngine, length: int, size: int, balance: Balance, **more: Any
) -> ElasticDataLoader:
    return ElasticDataLoader(
        Numbers(length), size, collate_fn=as_list, seed_samples=False, balance=balance, engine=engine, **more
    )


@settings(max_examples=150)
@given(
    length=st.integers(1, 40),
    size=st.integers(1, 12),
    budget=st.none() | st.integers(1, 60),
    similar=st.integers(1, 3),
    mean_over=st.sampled_from(["samples", "complexity"]),
    limit=st.none() | st.integers(1, 3),
    shuffle=st.booleans(),
    seed=st.integers(0, 5),
    workers=st.integers(1, 4),
    history=HISTORIES,
)
def test_every_history_uses_every_sample_once(
    length: int,
    size: int,
    budget: int | None,
    similar: int,
    mean_over: Any,
    limit: int | None,
    shuffle: bool,
    seed: int,
    workers: int,
    history: list[Any],
) -> None:
    complexities = complexities_of(length, seed)
    balance = Balance(complexities=complexities, budget=budget, similar_batches=similar, mean_over=mean_over)

    def make(engine: BalancedEngine) -> ElasticDataLoader:
        return make_loader(
            engine, length, size, balance, seed=seed, shuffle=shuffle, max_local_batch_size=limit
        )

    epochs = 3
    job = BalancedJob(make, epochs, workers)
    expected_steps = job.workers[0].loader.total_steps(epochs)
    job.play(history)
    for epoch in range(epochs):
        used = Counter(s for e, samples in job.committed if e == epoch for s in samples)
        assert set(used.values()) == {1} and len(used) == length
    assert len(job.committed) == expected_steps


def test_shares_are_even_by_cost_where_even_numbers_are_not() -> None:
    complexities = complexities_of(2000, 3)
    engine = BalancedEngine()
    loader = make_loader(engine, 2000, 100, Balance(complexities=complexities))
    plain = ElasticDataLoader(Numbers(2000), 100, engine=BalancedEngine())

    def imbalances(of: ElasticDataLoader) -> list[float]:
        found = []
        for batch in range(20):
            shares = [
                sum(
                    complexities[i]
                    for i in of.samples_of({"epoch": 0, "batch": batch}, StepPlan(1, 0, r, 4), r)
                )
                for r in range(4)
            ]
            found.append(max(shares) * 4 / sum(shares))
        return found

    assert max(imbalances(loader)) < 1.01 < 1.2 < max(imbalances(plain))
    position = {"epoch": 0, "batch": 7}
    both = [
        sorted(s for r in range(4) for s in of.samples_of(position, StepPlan(1, 0, r, 4), r))
        for of in (loader, plain)
    ]
    assert both[0] == both[1], "the global batches are those without balancing"


def test_the_mean_is_over_samples_or_over_complexity() -> None:
    complexities = [10.0, 4.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]

    def weights(mean_over: Any) -> tuple[list[float], list[float]]:
        counts = complexities if mean_over == "complexity" else [1.0] * 8
        found, expected = [], []
        for rank in range(2):
            engine = BalancedEngine()
            engine.plan = StepPlan(1, 0, rank, 2)
            balance = Balance(complexities=complexities, mean_over=mean_over)
            (data,) = list(make_loader(engine, 8, 8, balance))
            found.append(engine.weights[0])
            expected.append(sum(counts[i] for i in data) / sum(counts))
        return found, expected

    (by_samples, expected), (by_complexity, also_expected) = weights("samples"), weights("complexity")
    assert by_samples == pytest.approx(expected) and by_complexity == pytest.approx(also_expected)
    assert by_samples != pytest.approx(by_complexity), "or nothing is shown"


def test_micro_batches_are_balanced_too() -> None:
    complexities = complexities_of(60, 5)
    engine = BalancedEngine()
    loader = make_loader(engine, 60, 60, Balance(complexities=complexities), max_local_batch_size=20)
    sums = [sum(complexities[i] for i in data) for data in loader]
    assert len(sums) == 3 and max(sums) * 3 / sum(sums) < 1.1


def test_steps_follow_from_the_budget_and_not_from_the_workers() -> None:
    complexities = complexities_of(500)
    balance = Balance(complexities=complexities, budget=40.0)
    loader = make_loader(BalancedEngine(), 500, 50, balance)
    assert sum(complexities) / 40 <= len(loader) <= sum(complexities) / 40 * 1.5
    assert loader.total_steps(3) == sum(loader._division.batch_count(epoch) for epoch in range(3))
    for world_size in (1, 2, 3):
        used: Counter[int] = Counter()
        for batch in range(len(loader)):
            shares = [
                loader.samples_of({"epoch": 0, "batch": batch}, StepPlan(1, 0, r, world_size), r)
                for r in range(world_size)
            ]
            total = sum(complexities[i] for s in shares for i in s)
            assert total <= 40 or sum(map(len, shares)) == 1
            used.update(i for s in shares for i in s)
        assert used == Counter(range(500))


def test_complexities_are_computed_when_a_batch_needs_them() -> None:
    class Read(Numbers):
        def __init__(self) -> None:
            super().__init__(5000)
            self.read: list[int] = []

        def __getitem__(self, index: int) -> int:
            self.read.append(index)
            return index

    data = Read()
    loader = ElasticDataLoader(
        data, 10, balance=Balance(lambda sample: sample % 7), collate_fn=as_list, engine=BalancedEngine()
    )
    assert data.read == []
    next(iter(loader))
    assert len(set(data.read)) <= 1024 + 20, "those that the fingerprint compares, and the first batches"


def test_fingerprints_tell_complexities_and_budgets_apart() -> None:
    def fingerprint(**arguments: Any) -> dict[str, str]:
        balance = Balance(**{"complexities": complexities_of(50), **arguments})
        return make_loader(BalancedEngine(), 50, 5, balance).fingerprint()

    usual = fingerprint()
    assert usual == fingerprint() and all(isinstance(v, str) for v in usual.values())
    others = [
        fingerprint(complexities=complexities_of(50, 1)),
        fingerprint(budget=20.0),
        fingerprint(similar_batches=2),
        fingerprint(mean_over="complexity"),
    ]
    assert len({str(f) for f in [usual, *others]}) == 5


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({}, TypeError, "complexity_fn or complexities"),
        ({"complexity_fn": len, "complexities": [1.0]}, TypeError, "not both"),
        ({"complexity_fn": 3}, TypeError, "complexity_fn=3"),
        ({"complexity_fn": len, "budget": 0}, ValueError, "budget=0"),
        ({"complexity_fn": len, "budget": float("nan")}, ValueError, "budget=nan"),
        ({"complexity_fn": len, "similar_batches": 0}, ValueError, "similar_batches=0"),
        ({"complexity_fn": len, "similar_batches": 1.5}, TypeError, "similar_batches=1.5"),
        ({"complexity_fn": len, "mean_over": "tokens"}, ValueError, "mean_over='tokens'"),
    ],
)
def test_what_can_not_be_balanced_is_refused(arguments: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        Balance(**arguments)


def test_a_balance_of_another_kind_is_refused() -> None:
    with pytest.raises(TypeError, match=r"pass bagua_core\.Balance\(complexity_fn="):
        ElasticDataLoader([1, 2], 2, balance=len)  # type: ignore[arg-type]


def test_a_budget_drops_nothing() -> None:
    with pytest.raises(ValueError, match="drop_last=True does not go with a budget"):
        make_loader(BalancedEngine(), 50, 5, Balance(complexities=[1.0] * 50, budget=3.0), drop_last=True)


def test_even_shares_are_what_they_were() -> None:
    """Without `balance` nothing changes: positions of running jobs mean the same."""
    loader = ElasticDataLoader(Numbers(23), 10, shuffle=False, engine=BalancedEngine())
    for batch in (0, 1):
        for rank in range(3):
            places = share(10, 3, rank)
            expected = list(range(10 * batch + places.start, 10 * batch + places.stop))
            assert loader.samples_of({"epoch": 4, "batch": batch}, StepPlan(1, 0, rank, 3), rank) == expected
    short = [loader.samples_of({"epoch": 4, "batch": 2}, StepPlan(1, 0, rank, 3), rank) for rank in range(3)]
    assert short == [[20, 21, 22], [], []]
