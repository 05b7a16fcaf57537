"""The loader against histories of a job: nothing twice, nothing lost, whatever happens."""

from __future__ import annotations

import os
import random
import time
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from bagua_core.communication.step_interface import StepPlan
from bagua_core.data.balancing.balance import Balance
from bagua_core.data.elastic_loader import ElasticDataLoader
from bagua_core.data.partition import batch_count
from tests.core.data.fake_job import HISTORIES, FakeEngine, Job, Worker


class Numbers(Dataset[int]):
    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        return index


def as_list(samples: list[int]) -> list[int]:
    return samples


JOBS: dict[str, st.SearchStrategy[Any]] = {
    "length": st.integers(1, 17),
    "global_batch_size": st.integers(1, 9),
    "drop_last": st.booleans(),
    "limit": st.none() | st.integers(1, 3),
    "shuffle": st.booleans(),
    "workers": st.integers(1, 4),
    "history": HISTORIES,
}


@settings(max_examples=500)
@given(**JOBS)
def test_every_history_uses_every_sample_once(**drawn: Any) -> None:
    check_history(**drawn)


@pytest.mark.long
@settings(max_examples=2000)
@given(**JOBS)
def test_many_more_histories_use_every_sample_once(**drawn: Any) -> None:
    check_history(**drawn)


def check_history(
    length: int,
    global_batch_size: int,
    drop_last: bool,
    limit: int | None,
    shuffle: bool,
    workers: int,
    history: list[Any],
) -> None:
    if batch_count(length, global_batch_size, drop_last) == 0:
        drop_last = False

    def make(engine: FakeEngine) -> ElasticDataLoader:
        return ElasticDataLoader(
            Numbers(length),
            global_batch_size,
            drop_last=drop_last,
            max_local_batch_size=limit,
            shuffle=shuffle,
            collate_fn=as_list,
            seed_samples=False,
            engine=engine,
        )

    epochs = 2
    job = Job(make, epochs, workers)
    job.play(history)
    for epoch in range(epochs):
        used = Counter(s for e, samples in job.committed if e == epoch for s in samples)
        assert set(used.values()) == {1}
        expected = length // global_batch_size * global_batch_size if drop_last else length
        assert len(used) == expected
    assert len(job.committed) == epochs * batch_count(length, global_batch_size, drop_last)


def make_one(length: int = 10, size: int = 4, **arguments: Any) -> tuple[ElasticDataLoader, FakeEngine]:
    engine = FakeEngine()
    loader = ElasticDataLoader(Numbers(length), size, collate_fn=as_list, engine=engine, **arguments)
    return loader, engine


def test_world_of_one_is_an_ordinary_loader() -> None:
    loader, engine = make_one(shuffle=False)
    assert len(loader) == 3
    seen = [(epoch, data) for epoch in loader.epochs(2) for data in loader]
    one_epoch = [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert seen == [(e, d) for e in range(2) for d in one_epoch]
    assert engine.finished


def test_plain_iteration_goes_through_the_jobs_epochs() -> None:
    loader, _ = make_one()
    first, second = list(loader), list(loader)
    for batches in (first, second):
        assert sorted(sample for batch in batches for sample in batch) == list(range(10))
    assert first != second
    assert loader.position() == {"epoch": 2, "batch": 0}


def test_break_continues_after_what_is_committed() -> None:
    loader, _ = make_one(shuffle=False)
    seen = []
    for epoch in loader.epochs(1):
        for data in loader:
            seen.append((epoch, data))
            break
    assert seen == [(0, [0, 1, 2, 3]), (0, [4, 5, 6, 7]), (0, [8, 9])]


def test_a_step_ends_before_the_next_draw_where_the_script_says_so() -> None:
    loader, engine = make_one(8, 4, shuffle=False)
    used, moved = [], []
    batches = iter(loader)
    for outcome in ("roll back", "commit", "commit"):
        used.append(next(batches))
        engine.outcome = outcome
        moved.append(loader.end_step())
    assert used == [[0, 1, 2, 3], [0, 1, 2, 3], [4, 5, 6, 7]]
    assert moved == [False, True, True]
    assert loader.position() == {"epoch": 1, "batch": 0}


def test_a_step_does_not_end_between_its_micro_batches() -> None:
    loader, _ = make_one(8, 4, shuffle=False, max_local_batch_size=2)
    batches = iter(loader)
    assert next(batches) == [0, 1]
    with pytest.raises(RuntimeError, match="before the step's last micro-batch"):
        loader.end_step()
    assert next(batches) == [2, 3] and loader.end_step() and next(batches) == [4, 5]


@pytest.mark.parametrize(("limit", "expected"), [(2, [False, True] * 2), (4, [True] * 2), (None, [True] * 2)])
def test_the_end_of_a_step_is_its_last_micro_batch(limit: int | None, expected: list[bool]) -> None:
    loader, _ = make_one(8, 4, shuffle=False, max_local_batch_size=limit)
    assert [loader.is_at_step_end for _ in loader] == expected


def test_a_plan_kept_over_an_evaluation_is_looked_at_again() -> None:
    loader, engine = make_one(8, 4, shuffle=False)
    used = []
    for epoch in loader.epochs(2):
        for data in loader:
            used.append((epoch, data))
        engine.plan = StepPlan(2, 2, 0, 2)  # the evaluation met a new generation
    assert used == [(0, [0, 1, 2, 3]), (0, [4, 5, 6, 7]), (1, [0, 1]), (1, [4, 5])]


def test_a_heal_beyond_the_epochs_end_ends_the_iteration() -> None:
    loader, engine = make_one(8, 4)
    epochs = loader.epochs(2)
    assert next(epochs) == 0
    batches = iter(loader)
    next(batches)
    engine.outcome, engine.heal_to = "roll back", {"epoch": 1, "batch": 1}
    assert next(batches, None) is None
    assert next(epochs) == 1
    engine.outcome = "commit"
    assert len(list(loader)) == 1
    assert next(epochs, None) is None and engine.finished


@pytest.mark.parametrize("body", [lambda loader: None, iter, lambda loader: list(islice(loader, 0))])
def test_an_epoch_that_the_script_skips_is_an_error_and_not_yielded_for_ever(body: Any) -> None:
    loader, engine = make_one(8, 4)
    epochs = loader.epochs(2)
    assert next(epochs) == 0
    body(loader)
    with pytest.raises(RuntimeError, match=r"epoch 0 was not iterated"):
        next(epochs)
    epochs = loader.epochs(2)  # begins where the job is
    assert next(epochs) == 0 and len(list(loader)) == 2
    assert next(epochs) == 1 and len(list(islice(loader, 1))) == 1
    assert next(epochs) == 1 and len(list(loader)) == 1, "the rest of it"
    assert next(epochs, None) is None and engine.finished


@pytest.mark.parametrize(("each", "passes"), [(5, [0, 0, 0, 1, 1, 1]), (4, [0, 0, 0, 1, 1, 1, 1])])
def test_an_iterator_may_live_longer_than_one_pass_of_epochs(each: int, passes: list[int]) -> None:
    """As in a script that evaluates after every few draws. Four draws end with an epoch's last batch: the next pass
    finds the iterator at its end."""
    loader, engine = make_one(48, 4)
    drawn: list[list[int]] = []
    seen = []
    batches = iter(loader)
    for epoch in loader.epochs(2):
        seen.append(epoch)
        draws = list(islice(batches, each))
        if len(draws) < each:
            batches = iter(loader)
        drawn += draws
    assert seen == passes and engine.finished
    assert sorted(sample for batch in drawn for sample in batch) == sorted([*range(48), *range(48)])


def test_an_iterator_at_its_end_does_not_keep_epochs_going() -> None:
    loader, _ = make_one(8, 4)
    batches = iter(loader)
    seen = []
    with pytest.raises(RuntimeError, match="epoch 1 was not iterated"):
        for epoch in loader.epochs(2):
            seen.append((epoch, len(list(batches))))
    assert seen == [(0, 2), (1, 0)]


def test_two_iterations_at_once_are_refused() -> None:
    loader, _ = make_one()
    first = iter(loader)
    next(first)
    next(iter(loader))
    with pytest.raises(RuntimeError, match="iterated again"):
        next(first)


@pytest.mark.parametrize(("limit", "sizes"), [(1, [1, 1]), (2, [2])])
def test_healing_rank_gets_a_filler_of_weight_zero(limit: int, sizes: list[int]) -> None:
    loader, engine = make_one(10, 4, max_local_batch_size=limit)
    engine.plan = StepPlan(3, 0, 1, 3, frozenset({1}))
    batches = iter(loader)
    assert [len(next(batches)) for _ in sizes] == sizes
    assert [(m.weight, m.last) for m in engine.begun] == [
        (0.0, place == len(sizes)) for place in range(1, len(sizes) + 1)
    ]


class NumbersAsStream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(8))


@pytest.mark.parametrize(
    ("dataset", "arguments"),
    [
        (Numbers(8), {}),
        (Numbers(8), {"sampler": range(8)}),
        (Numbers(8), {"balance": Balance(complexities=[1.0] * 8)}),
        (NumbersAsStream(), {}),
    ],
)
def test_a_filler_is_no_larger_than_a_worker_takes_at_once(dataset: Any, arguments: dict[str, Any]) -> None:
    """Part 2 of 3 has two of eight samples, and a filler in the third micro-batch."""
    engine = FakeEngine()
    loader = ElasticDataLoader(
        dataset, 8, max_local_batch_size=1, collate_fn=as_list, engine=engine, **arguments
    )
    engine.plan = StepPlan(1, 0, 2, 3)
    batches = iter(loader)
    sizes = [len(next(batches)) for _ in range(3)]
    assert [m.weight for m in engine.begun] == [1 / 8, 1 / 8, 0.0]
    assert sizes == [1, 1, 1]


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"batch_size": 32}, TypeError, "batch_size=32.*global_batch_size"),
        ({"batch_sampler": [[0]]}, TypeError, "batch_sampler"),
        ({"generator": torch.Generator()}, TypeError, "seed"),
        ({"wrong": 1}, TypeError, "no argument wrong=1"),
        ({"global_batch_size": 0}, ValueError, "global_batch_size=0"),
        ({"global_batch_size": 2.5}, TypeError, "global_batch_size=2.5"),
        ({"max_local_batch_size": 0}, ValueError, "max_local_batch_size=0"),
        ({"global_batch_size": 11, "drop_last": True}, ValueError, "no batch.*11 with drop_last"),
        ({"num_workers": 1, "persistent_workers": False}, ValueError, "persistent_workers=False"),
        ({"global_batch_size": None}, TypeError, "global_batch_size is required"),
    ],
)
def test_what_contradicts_elasticity_is_refused(
    arguments: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        ElasticDataLoader(Numbers(10), **{"global_batch_size": 4, **arguments})


def test_seek_refuses_positions_of_another_job() -> None:
    loader, _ = make_one()
    with pytest.raises(ValueError, match="another job's"):
        loader.seek({"epoch": 0, "batch": 3})


def test_fingerprint_tells_orders_apart() -> None:
    first, second = make_one(seed=1)[0].fingerprint(), make_one(seed=2)[0].fingerprint()
    assert first["order_of_epoch_0"] != second["order_of_epoch_0"]
    assert first == make_one(seed=1)[0].fingerprint()
    assert all(isinstance(v, str) for v in first.values())


# -- real worker processes


class Slow(Dataset[tuple[int, int, float]]):
    """Samples tell who loaded them and what it drew."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> tuple[int, int, float]:
        return index, os.getpid(), random.random()


def test_worker_processes_survive_generations() -> None:
    engine = FakeEngine()
    loader = ElasticDataLoader(Slow(), 4, num_workers=2, shuffle=False, engine=engine, timeout=30)
    try:
        worker = Worker(loader, engine, epochs=3)
        used: dict[int, list[int]] = {0: [], 1: [], 2: []}
        loaded_by = set()

        def take(commits: bool = True) -> list[int]:
            draw = worker.draw_step()
            assert draw is not None
            ((epoch, (indices, processes, _), micro_batch),) = draw
            loaded_by.update(processes.tolist())
            engine.outcome = "commit" if commits else "roll back"
            if commits and micro_batch.weight:
                used[epoch] += indices.tolist()
            return indices.tolist()

        take()
        processes = loader.worker_process_ids
        assert len(processes) == 2
        assert take(commits=False) == take()  # rolled back and served again
        engine.plan = StepPlan(2, 2, 1, 2)
        assert take() == [10, 11]
        engine.plan = StepPlan(3, 3, 1, 2, frozenset({1}))
        take()  # only copies the state
        engine.plan = StepPlan(4, 4, 0, 1)
        while (draw := worker.draw_step()) is not None:
            ((epoch, (indices, pids, _), _),) = draw
            used[epoch] += indices.tolist()
            loaded_by.update(pids.tolist())
        assert loader.worker_process_ids == processes
        assert loaded_by == set(processes)
        assert used[0] == [*range(8), 10, 11, *range(16, 24)]
        assert used[1] == used[2] == list(range(24))
    finally:
        loader.close()
    assert loader.worker_process_ids == []
    for process_id in processes:
        with pytest.raises(ProcessLookupError):
            os.kill(process_id, 0)


def test_augmentation_is_the_same_in_every_process() -> None:
    def drawn(workers: int, world_size: int) -> dict[tuple[int, int], float]:
        values = {}
        for global_rank in range(world_size):
            engine = FakeEngine()
            engine.plan = StepPlan(1, 0, global_rank, world_size)
            loader = ElasticDataLoader(Slow(), 6, seed=5, num_workers=workers, engine=engine)
            for epoch in loader.epochs(2):
                for indices, _, numbers in loader:
                    for index, number in zip(indices.tolist(), numbers.tolist(), strict=True):
                        values[epoch, index] = number
            loader.close()
        return values

    alone = drawn(0, 1)
    assert len(alone) == len(set(alone.values())) == 48
    assert drawn(2, 3) == alone == drawn(0, 2)


class Poisoned(Dataset[int]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        if index == 5:
            raise KeyError("sample five is broken")
        return index


@pytest.mark.parametrize("num_workers", [0, 1])
def test_errors_of_the_data_set_reach_the_script(num_workers: int) -> None:
    engine = FakeEngine()
    loader = ElasticDataLoader(Poisoned(), 2, shuffle=False, num_workers=num_workers, engine=engine)
    try:
        batches = iter(loader)
        assert [next(batches).tolist() for _ in range(2)] == [[0, 1], [2, 3]]
        with pytest.raises(KeyError, match="sample five is broken") as caught:
            next(batches)
        assert num_workers == 0 or "in __getitem__" in str(caught.value)
        assert loader.position() == {"epoch": 0, "batch": 2}
        with pytest.raises(KeyError):  # again, from the same place
            next(iter(loader))
    finally:
        loader.close()


class Stuck(Dataset[int]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> int:
        if index >= 4:
            time.sleep(3600)
        return index


def test_close_is_bounded_with_workers_stuck_in_the_data_set() -> None:
    loader = ElasticDataLoader(Stuck(), 2, shuffle=False, num_workers=2, engine=FakeEngine())
    next(iter(loader))
    processes = loader.worker_process_ids
    began_s = time.monotonic()
    loader.close()
    assert time.monotonic() - began_s < 8
    for process_id in processes:
        with pytest.raises(ProcessLookupError):
            os.kill(process_id, 0)


def test_iterating_leaves_the_scripts_random_numbers_alone() -> None:
    loader, _ = make_one()
    random.seed(1)
    torch.manual_seed(1)
    expected = (random.random(), torch.rand(1).item())
    random.seed(1)
    torch.manual_seed(1)
    list(loader)
    assert (random.random(), torch.rand(1).item()) == expected


def test_default_collation_matches_torch() -> None:
    data = TensorDataset(torch.arange(12.0).view(6, 2), torch.arange(6))
    ours = list(ElasticDataLoader(data, 4, shuffle=False, engine=FakeEngine()))
    theirs = list(DataLoader(data, 4))
    for mine, expected in zip(ours, theirs, strict=True):
        assert type(mine) is type(expected)
        assert all(torch.equal(a, b) for a, b in zip(mine, expected, strict=True))
