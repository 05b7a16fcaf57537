"""A batch's virtual shards are the same for any number of workers; only their owners change."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from bagua_core.communication.step_interface import MicroBatch, StepPlan
from bagua_core.data.balancing.balance import Balance
from bagua_core.data.elastic_loader import ElasticDataLoader
from bagua_core.errors import NotDeterministicError
from tests.core.data.fake_job import FakeEngine

LENGTH, BATCH, SHARDS = 22, 8, 4  # the last batch has six samples


class Numbers(Dataset[int]):
    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> int:
        return index


class Drawing(Numbers):
    """Samples with a random number each."""

    def __getitem__(self, index: int) -> int:
        return index + 1000 * random.randrange(1000)


class Worker:
    """Draws batches of an engine that says which part of the world it is."""

    def __init__(self, dataset: Any, shards: int, **options: Any) -> None:
        self.engine = FakeEngine()
        self.engine.virtual_shards = shards
        options.setdefault("collate_fn", list)
        self.loader = ElasticDataLoader(dataset, BATCH, engine=self.engine, seed=3, **options)
        self.batches = iter(self.loader)

    def step(self, plan: StepPlan) -> list[tuple[MicroBatch, Any]]:
        self.engine.plan = plan
        drawn = []
        while not drawn or not drawn[-1][0].last:
            batch = next(self.batches)
            drawn.append((self.engine.begun[-1], batch))
        return drawn


def shards_of(workers: int, dataset: Any, batch: int, shards: int = SHARDS, **options: Any) -> dict[int, Any]:
    """What each shard of a batch of epoch 0 consists of."""
    found: dict[int, Any] = {}
    for rank in range(workers):
        worker = Worker(dataset, shards, **options)
        plans = [StepPlan(1, step, rank, workers) for step in range(batch + 1)]
        for micro_batch, drawn in [worker.step(plan) for plan in plans][-1]:
            if micro_batch.shard is not None:
                assert micro_batch.weight == pytest.approx(len(drawn) / min(BATCH, LENGTH - batch * BATCH))
                found[micro_batch.shard] = drawn
    return found


@pytest.mark.parametrize("batch", [0, 2])
def test_shards_do_not_depend_on_the_workers(batch: int) -> None:
    alone = shards_of(1, Drawing(), batch)
    assert sorted(alone) == list(range(SHARDS))
    for workers in (2, 3, 4, 5):
        assert shards_of(workers, Drawing(), batch) == alone, workers


def test_a_short_batch_has_fewer_shards_and_other_workers_have_a_filler() -> None:
    for workers in (1, 7):
        found = shards_of(workers, Numbers(), 2, shards=7)
        assert sorted(found) == list(range(6)) and all(len(drawn) == 1 for drawn in found.values())
    worker = Worker(Numbers(), 2)
    ((micro_batch, drawn),) = worker.step(StepPlan(1, 0, 2, 3))
    assert micro_batch == MicroBatch(0.0, True, None, 2) and len(drawn) == 2


def test_a_worker_that_heals_has_no_shard_and_the_others_own_all() -> None:
    worker = Worker(Numbers(), SHARDS)
    ((micro_batch, _),) = worker.step(StepPlan(1, 0, 0, 2, frozenset({0})))
    assert micro_batch.shard is None and micro_batch.shards == SHARDS
    other = Worker(Numbers(), SHARDS)
    assert len(other.step(StepPlan(1, 0, 1, 2, frozenset({0})))) == SHARDS


def test_samples_of_all_workers_are_the_batch() -> None:
    worker = Worker(Numbers(), SHARDS)
    plan = StepPlan(1, 0, 0, 3)
    worker.step(plan)
    position = {"epoch": 0, "batch": 0}
    samples = [i for rank in range(3) for i in worker.loader.samples_of(position, plan, rank)]
    assert sorted(samples) == sorted(set(samples)) and len(samples) == BATCH
    assert worker.loader.sample_count(position) == BATCH


def test_a_collate_function_draws_the_same_for_a_shard_of_tensors() -> None:
    def noisy(samples: list[Any]) -> list[float]:
        return [random.random() for _ in samples]

    data = TensorDataset(torch.arange(LENGTH))
    assert shards_of(1, data, 0, collate_fn=noisy) == shards_of(4, data, 0, collate_fn=noisy)


def test_a_world_larger_than_the_shards_is_named_once(capsys: pytest.CaptureFixture[str]) -> None:
    worker = Worker(Numbers(), 2)
    for step in range(2):
        worker.step(StepPlan(1, step, 0, 5))
    assert capsys.readouterr().err.count("5 workers and 2 virtual shards: 3 workers are idle") == 1


class Stream(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(LENGTH))


@pytest.mark.parametrize(
    ("dataset", "options", "words"),
    [
        (Stream(), {}, "IterableDataset"),
        (Numbers(), {"balance": Balance(lambda sample: 1)}, "leave balance out"),
        (Numbers(), {"max_local_batch_size": 2}, "max_local_batch_size=2"),
        (Numbers(), {"seed_samples": False}, "seed_samples=False"),
    ],
)
def test_what_has_no_fixed_order_is_refused(dataset: Any, options: dict[str, Any], words: str) -> None:
    worker = Worker(dataset, SHARDS, **options)
    with pytest.raises(NotDeterministicError, match=words):
        worker.step(StepPlan(1, 0, 0, 1))
