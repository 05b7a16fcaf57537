"""A data set with set_epoch knows the job's epoch in whatever process reads it."""

from __future__ import annotations

import random
from typing import Any

import pytest
from torch.utils.data import ConcatDataset, Dataset, Subset

from bagua_core.communication.step_interface import StepPlan
from bagua_core.data.elastic_loader import ElasticDataLoader
from tests.core.data.fake_job import FakeEngine


class Staged(Dataset[Any]):
    """Samples tell the epoch, and what set_epoch drew for it."""

    def __init__(self) -> None:
        self.epoch, self.drawn, self.calls = -1, 0.0, 0

    def set_epoch(self, epoch: int) -> None:
        if epoch == 2:
            raise LookupError("no epoch 2")
        self.epoch, self.drawn, self.calls = epoch, random.random(), self.calls + 1

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> tuple[int, int, float, int]:
        return self.epoch, index, self.drawn, self.calls


def as_list(samples: list[Any]) -> list[Any]:
    return samples


def loader_of(
    dataset: Any, engine: FakeEngine | None = None, **arguments: Any
) -> tuple[ElasticDataLoader, FakeEngine]:
    engine = engine or FakeEngine()
    settings = {"seed": 3, "shuffle": False, "collate_fn": as_list, **arguments}
    return ElasticDataLoader(dataset, 2, engine=engine, **settings), engine


@pytest.mark.parametrize("num_workers", [0, 1, 2])
def test_samples_are_of_the_epoch_in_which_they_are_read(num_workers: int) -> None:
    dataset = Staged()
    loader, _ = loader_of(dataset, num_workers=num_workers)
    random.seed(1)
    expected = random.random()
    random.seed(1)
    try:
        samples = [sample for _ in loader.epochs(2) for batch in loader for sample in batch]
    finally:
        loader.close()
    assert [sample[:2] for sample in samples] == [(epoch, index) for epoch in range(2) for index in range(4)]
    assert len({drawn for _, _, drawn, _ in samples}) == 2, "by (seed, epoch), alike in all processes"
    assert [calls for *_, calls in samples] == [1] * 4 + [2] * 4, "once for each epoch"
    assert random.random() == expected, "the script's own numbers go on"
    if num_workers:
        assert dataset.epoch == -1


def test_a_joiner_and_a_worker_that_is_set_back_read_the_jobs_epoch() -> None:
    loader, engine = loader_of(Staged())
    engine.heal_to = {"epoch": 1, "batch": 1}
    batches = iter(loader)
    assert [sample[:2] for sample in next(batches)] == [(1, 2), (1, 3)]
    engine.outcome, engine.heal_to = "roll back", {"epoch": 0, "batch": 1}
    assert [sample[:2] for sample in next(iter(loader))] == [(0, 2), (0, 3)]
    engine.plan = StepPlan(2, 1, 1, 2)
    engine.heal_to = {"epoch": 1, "batch": 0}
    assert [sample[:2] for sample in next(iter(loader))] == [(1, 1)]


@pytest.mark.parametrize(
    "wrap", [lambda d: Subset(d, range(4)), lambda d: Subset(ConcatDataset([d, d]), range(2, 6))]
)
def test_a_data_set_in_torchs_wrappers_knows_it_too(wrap: Any) -> None:
    loader, _ = loader_of(wrap(Staged()), num_workers=1)
    try:
        assert [[s[0] for b in loader for s in b] for _ in loader.epochs(2)] == [[0] * 4, [1] * 4]
    finally:
        loader.close()


@pytest.mark.parametrize("num_workers", [0, 1])
def test_an_error_of_set_epoch_is_the_scripts_where_the_epoch_is_needed(num_workers: int) -> None:
    loader, _ = loader_of(Staged(), num_workers=num_workers)
    try:
        assert len([batch for _ in loader.epochs(2) for batch in loader]) == 4
        for _ in range(2):
            with pytest.raises(LookupError, match="no epoch 2"):
                next(iter(loader))
    finally:
        loader.close()
