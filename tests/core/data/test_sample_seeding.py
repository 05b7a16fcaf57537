"""A sample's random numbers follow from (seed, epoch, sample), without an effect on others."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset

from bagua_core.data import sample_seeding
from bagua_core.data.elastic_loader import ElasticDataLoader
from bagua_core.data.sample_seeding import (
    has_no_randomness,
    load_samples,
    load_seeded_samples,
    random_sources_kept,
    seed_random_sources,
)
from tests.core.data.fake_job import FakeEngine


class Drawing(Dataset[Any]):
    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> tuple[int, float, float, float]:
        return index, random.random(), float(np.random.rand()), torch.rand(1).item()


class Together(Drawing):
    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[index] for index in indices]


def test_draws_do_not_depend_on_neighbours() -> None:
    whole = load_seeded_samples(Drawing(), 1, 2, [3, 4, 5])
    assert load_seeded_samples(Drawing(), 1, 2, [5, 3]) == [whole[2], whole[0]]
    assert load_seeded_samples(Together(), 1, 2, [4]) == [whole[1]]
    assert load_seeded_samples(Together(), 1, 2, [5, 4]) == [whole[2], whole[1]]
    assert len({value for sample in whole for value in sample}) == 12
    assert load_seeded_samples(Drawing(), 1, 3, [3]) != [whole[0]]
    assert load_seeded_samples(Drawing(), 2, 2, [3]) != [whole[0]]


def test_the_scripts_random_numbers_go_on() -> None:
    seed_random_sources(9)
    expected = Drawing()[0]
    seed_random_sources(9)
    with random_sources_kept():
        load_seeded_samples(Drawing(), 1, 2, [3, 4, 5])
    assert Drawing()[0] == expected


def test_unseeded_reading_asks_for_all_at_once() -> None:
    asked = []

    class Recording(Together):
        def __getitems__(self, indices: list[int]) -> list[Any]:
            asked.append(indices)
            return super().__getitems__(indices)

    load_samples(Recording(), [1, 2])
    assert asked == [[1, 2]]


def test_tensors_need_no_seeds() -> None:
    tensors = TensorDataset(torch.zeros(4, 1))

    class Noisy(TensorDataset):
        pass

    assert has_no_randomness(tensors)
    assert has_no_randomness(Subset(ConcatDataset([tensors, tensors]), [1]))
    assert not has_no_randomness(Noisy(torch.zeros(4, 1)))
    assert not has_no_randomness(ConcatDataset([tensors, Drawing()]))


class Each(Dataset[Any]):
    """A data set of which nothing is known."""

    def __init__(self, other: Any) -> None:
        self.other = other

    def __len__(self) -> int:
        return len(self.other)

    def __getitem__(self, index: int) -> Any:
        return self.other[index]


def batches_seeds_and_reads(
    dataset: Any, patched: pytest.MonkeyPatch
) -> tuple[list[torch.Tensor], list[int], int]:
    """Of one epoch of two batches of eight: what was yielded, the seeds, and how often a batch was read in one call."""
    seeds, together = [], []

    def seed(value: int) -> None:
        seeds.append(value)
        seed_random_sources(value)

    def load(dataset: Any, indices: Any) -> list[Any]:
        together.append(indices)
        return load_samples(dataset, indices)

    def masked(samples: list[Any]) -> torch.Tensor:
        return torch.stack([sample[0] for sample in samples]) + torch.rand(8)

    patched.setattr(sample_seeding, "seed_random_sources", seed)
    patched.setattr(sample_seeding, "load_samples", load)
    loader = ElasticDataLoader(dataset, 8, seed=3, collate_fn=masked, engine=FakeEngine())
    batches = [batch for _ in loader.epochs(1) for batch in loader]
    return batches, seeds, len(together)


def test_a_collate_function_over_tensors_costs_one_seed_of_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = Subset(TensorDataset(torch.arange(16.0)), range(16))
    batches, seeds, reads = batches_seeds_and_reads(tensors, monkeypatch)
    assert (len(seeds), reads) == (2, 2)
    seeded_each, all_seeds, _ = batches_seeds_and_reads(Each(tensors), monkeypatch)
    assert seeds == [all_seeds[7], all_seeds[15]] and len(all_seeds) == 16
    assert torch.equal(torch.stack(batches), torch.stack(seeded_each)), "the same numbers are drawn"
