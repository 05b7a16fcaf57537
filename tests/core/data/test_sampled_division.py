"""A sampler gives the order of the whole job; the split stays the loader's, whatever happens to the workers."""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import Dataset, DistributedSampler, RandomSampler, Sampler, WeightedRandomSampler

from bagua_core.communication.step_interface import StepPlan
from bagua_core.data.balancing.balance import Balance
from bagua_core.data.elastic_loader import ElasticDataLoader
from bagua_core.data.sampled_division import SamplerError
from tests.core.data.fake_job import HISTORIES, FakeEngine, Job, Worker

LENGTH = 23


class Numbers(Dataset[int]):
    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> int:
        return index


class Curriculum(Sampler[int]):
    """Epochs of growing length, in an order of Python's generator."""

    def __init__(self) -> None:
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter(random.sample(range(LENGTH), 7 + 5 * self.epoch))


def weighted() -> Sampler[int]:
    return WeightedRandomSampler([1.0, 9.0] + [0.5] * (LENGTH - 2), 30)


def as_list(samples: list[int]) -> list[int]:
    return samples


def loader_of(sampler: Any, engine: FakeEngine | None = None, **more: Any) -> ElasticDataLoader:
    arguments = {"seed": 5, "collate_fn": as_list, "seed_samples": False, **more}
    return ElasticDataLoader(Numbers(), 6, sampler=sampler, engine=engine or FakeEngine(), **arguments)


def steps_of(
    loader: ElasticDataLoader, world_sizes: Iterator[int], epochs: int
) -> list[tuple[int, list[int]]]:
    """Epoch and samples of each step, in worlds of these sizes."""
    loader._attached_engine()
    position, steps = loader.position(), []
    while position["epoch"] < epochs:
        plan = StepPlan(1, 0, 0, next(world_sizes))
        shares = [loader.samples_of(position, plan, rank) for rank in range(plan.world_size)]
        assert max(map(len, shares)) - min(map(len, shares)) <= 1
        steps.append((position["epoch"], list(itertools.chain(*shares))))
        position = loader.after(position)
    return steps


@pytest.mark.parametrize("make", [weighted, Curriculum])
def test_the_order_is_the_samplers_for_every_number_of_workers(make: Callable[[], Sampler[int]]) -> None:
    alone = steps_of(loader_of(make()), itertools.repeat(1), 3)
    assert steps_of(loader_of(make()), itertools.cycle([3, 1, 4, 2]), 3) == alone
    assert steps_of(loader_of(make(), seed=6), itertools.repeat(1), 3) != alone
    lengths = [sum(len(s) for e, s in alone if e == epoch) for epoch in range(3)]
    assert lengths == ([30, 30, 30] if make is weighted else [7, 12, 17])


def test_weights_are_respected() -> None:
    used = [
        index for _, samples in steps_of(loader_of(weighted()), itertools.repeat(2), 20) for index in samples
    ]
    share = 9.0 / (10.0 + 0.5 * (LENGTH - 2))
    assert abs(used.count(1) / len(used) - share) < 4 * (share * (1 - share) / len(used)) ** 0.5


@settings(max_examples=150)
@given(workers=st.integers(1, 4), limit=st.none() | st.integers(1, 3), history=HISTORIES)
def test_every_history_uses_the_samplers_epochs_once(
    workers: int, limit: int | None, history: list[Any]
) -> None:
    job = Job(lambda engine: loader_of(Curriculum(), engine, max_local_batch_size=limit), 2, workers)
    job.play(history)
    assert job.committed == steps_of(loader_of(Curriculum()), itertools.repeat(1), 2)


def test_the_scripts_random_numbers_are_its_own() -> None:
    random.seed(1)
    torch.manual_seed(1)
    expected = random.random(), float(torch.rand(1))
    random.seed(1)
    torch.manual_seed(1)
    assert len(list(loader_of(Curriculum()))) == 2
    assert len(list(loader_of(weighted()))) == 5
    assert (random.random(), float(torch.rand(1))) == expected


class OwnNumbers(Sampler[int]):
    def __init__(self) -> None:
        self._random = random.Random(1)

    def __iter__(self) -> Iterator[int]:
        return iter(self._random.sample(range(LENGTH), LENGTH))


@pytest.mark.parametrize(
    ("sampler", "more", "error", "words"),
    [
        (OwnNumbers(), {}, SamplerError, "OwnNumbers gave two orders for epoch 0"),
        (RandomSampler(Numbers(), generator=torch.Generator()), {}, SamplerError, "leave generator out"),
        (DistributedSampler(Numbers(), 2, 0), {}, TypeError, "one worker's part"),
        (iter([1, 2]), {}, TypeError, "once for each epoch"),
        (7, {}, TypeError, "sampler=7"),
        ([], {}, SamplerError, "list gave 0 indices for epoch 0"),
        ([1, 2], {"drop_last": True}, SamplerError, "2 indices.*global_batch_size=6"),
        ([1, LENGTH], {}, SamplerError, "index 23 for a data set of 23"),
        ([-1], {}, SamplerError, "index -1"),
        ([[1, 2]], {}, SamplerError, "something else than integers"),
        ([1], {"balance": Balance(lambda _: 1.0)}, ValueError, "leave one of them out"),
    ],
)
def test_a_sampler_that_workers_cannot_have_in_common_is_refused(
    sampler: Any, more: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        next(iter(loader_of(sampler, **more)))


def test_workers_with_different_samplers_differ_in_their_fingerprint() -> None:
    one, other = loader_of([1, 2, 3]).fingerprint(), loader_of([1, 3, 2]).fingerprint()
    assert {name for name in one if one[name] != other[name]} == {"order_of_epoch_0"}
    assert loader_of(weighted()).fingerprint() == loader_of(weighted()).fingerprint()


@pytest.mark.parametrize("num_workers", [0, 1])
def test_reading_ahead_draws_no_epoch_that_the_job_does_not_have(num_workers: int) -> None:
    """Epoch 4 of Curriculum would have 27 of 23 samples."""
    loader = loader_of(Curriculum(), num_workers=num_workers)
    try:
        batches = [batch for _ in loader.epochs(4) for batch in loader]
        processes = loader.worker_process_ids
        assert batches == [
            samples for _, samples in steps_of(loader_of(Curriculum()), itertools.repeat(1), 4)
        ]
        with pytest.raises(ValueError, match="larger than population"):
            next(iter(loader))
        assert len(processes) == num_workers
    finally:
        loader.close()


# -- samplers with a state that the script changes between two epochs


class Importance(Sampler[int]):
    """Draws `first_count` samples, and `count` once it has learned."""

    def __init__(self, first_count: int = LENGTH - 1, count: int = LENGTH - 1) -> None:
        self.weights = torch.ones(LENGTH)
        self.count, self._later_count = first_count, count

    def learn(self, epoch: int) -> None:
        self.weights = torch.arange(1.0, LENGTH + 1) ** (epoch + 1)
        self.count = self._later_count

    def __iter__(self) -> Iterator[int]:
        return iter(torch.multinomial(self.weights, self.count).tolist())

    def state_dict(self) -> dict[str, Any]:
        return {"weights": self.weights, "count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.weights, self.count = state["weights"], state["count"]


class LearningEngine(FakeEngine):
    sampler: Importance


class LearningWorker(Worker):
    engine: LearningEngine

    def _loop(self) -> Iterator[tuple[int, Any]]:
        for epoch in self.loader.epochs(self.epochs):
            for data in self.loader:
                yield epoch, data
            self.engine.sampler.learn(epoch)


class LearningJob(Job):
    def __init__(
        self,
        workers: int,
        registered: bool = True,
        make_sampler: Callable[[], Importance] = Importance,
        **arguments: Any,
    ) -> None:
        """arguments: of the loader."""
        self._registered, self._make_sampler, self._arguments = registered, make_sampler, arguments
        super().__init__(None, 4, workers)

    def _add(self) -> Worker:
        engine = LearningEngine()
        engine.sampler = self._make_sampler()
        if self._registered:
            engine.register_state("weights", engine.sampler)
        loader = loader_of(engine.sampler, engine, **self._arguments)
        worker = LearningWorker(loader, engine, self.epochs)
        self.workers.append(worker)
        return worker

    def close(self) -> None:
        for worker in self.workers:
            worker.loader.close()


def learned_alone(make_sampler: Callable[[], Importance] = Importance) -> list[tuple[int, list[int]]]:
    job = LearningJob(1, make_sampler=make_sampler)
    job.play([])
    return job.committed


def quiet(steps: int) -> list[Any]:
    return [(set(), 0, None)] * steps


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("before", [3, 4, 6, 7])
def test_a_worker_that_joins_has_the_order_of_the_weights_that_it_copies(
    num_workers: int, before: int
) -> None:
    job = LearningJob(2, num_workers=num_workers)
    try:
        job.play([*quiet(before), (set(), 1, None)])
        fingerprints = {tuple(w.loader.fingerprint().items()) for w in job.workers}
        assert job.committed == learned_alone()
        assert len(job.workers) == 3 and len(fingerprints) == 1
    finally:
        job.close()


@settings(max_examples=40)
@given(workers=st.integers(1, 4), history=HISTORIES)
def test_every_history_has_the_orders_of_the_weights_of_their_epochs(
    workers: int, history: list[Any]
) -> None:
    job = LearningJob(workers)
    job.play(history)
    assert job.committed == learned_alone()


@pytest.mark.parametrize("limit", [None, 1, 2])
@pytest.mark.parametrize("counts", [(5, 20), (20, 5)])
@pytest.mark.parametrize("before", [1, 2, 3, 4, 5])
def test_a_worker_joins_an_epoch_whose_length_follows_from_the_state_that_it_copies(
    before: int, counts: tuple[int, int], limit: int | None
) -> None:
    make_sampler = functools.partial(Importance, *counts)
    job = LearningJob(2, make_sampler=make_sampler, max_local_batch_size=limit)
    job.play([*quiet(before), (set(), 1, None)])
    assert job.committed == learned_alone(make_sampler)
    assert len(job.workers) == 3


def test_weights_that_do_not_travel_are_refused() -> None:
    job = LearningJob(2, registered=False)
    with pytest.raises(SamplerError, match=r"Importance gives another order for epoch 1.*register_state"):
        job.play([*quiet(6), (set(), 1, None)])


def test_a_position_behind_the_samplers_epoch_is_refused_when_its_step_begins() -> None:
    """As of a checkpoint that another sampler has written."""
    loader = loader_of(Importance(5))
    loader.seek({"epoch": 1, "batch": 1})
    with pytest.raises(SamplerError, match="gave 5 indices for epoch 1, in which the job is at batch 1"):
        next(iter(loader))


def test_the_fingerprint_is_that_of_the_beginning() -> None:
    sampler = Importance()
    loader = loader_of(sampler)
    before = dict(loader.fingerprint())
    for epoch in loader.epochs(4):
        assert len(list(loader)) == 4
        sampler.learn(epoch)
    assert loader.fingerprint() == before
