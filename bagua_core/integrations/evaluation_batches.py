"""Divides an evaluation loader's samples among the workers that there are when an evaluation begins."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from bagua_core.data.partition import share
from bagua_core.data.sample_seeding import random_sources_kept, seed_random_sources
from bagua_core.integrations.loader_settings import UnsupportedInElasticJob, reading_settings

Place = Callable[[], tuple[int, int]]  # rank and world size now
Placed = Callable[[Any], Any]


class SharedBatches:
    """A batch sampler that yields this worker's part of each batch that the workers have together.

    The parts of a batch, by rank, are in the order of the samples, so a gather of each batch returns that order. All
    workers have equally many batches, as synchronised metrics need (with batch_size=1 some may have one less), and
    their numbers of samples differ by at most one. Where there are fewer samples than workers, each worker takes
    all of them.
    """

    def __init__(self, samples: Any, batch_size: int, place: Place) -> None:
        self._samples = samples
        self._batch_size = batch_size
        self._place = place

    def __iter__(self) -> Iterator[list[Any]]:
        samples = self._order()
        rank, world_size = self._place()
        if len(samples) < world_size:
            rank, world_size = 0, 1
        turns = -(-len(samples) // world_size)  # in each every worker takes one sample
        count = -(-turns // self._batch_size)
        for i in range(count):
            # the last one is the longest, so that no worker is without a sample of it
            whole = samples[i * turns // count * world_size : (i + 1) * turns // count * world_size]
            own = share(len(whole), world_size, rank)
            if batch := whole[own.start : own.stop]:
                yield batch

    def _order(self) -> list[Any]:
        """Returns the order of the samples, the same in each evaluation and on all workers, whose random generators may
        be in different states."""
        with random_sources_kept(), _kept(getattr(self._samples, "generator", None)) as own:
            seed_random_sources(0)
            if own is not None:
                own.manual_seed(0)
            # where the generator is that is seeded, whatever the script's default
            with torch.device("cpu") if own is None else own.device:
                return list(self._samples)


@contextmanager
def _kept(generator: object) -> Iterator[torch.Generator | None]:
    """Restores the generator's state at its end, if the generator is one of torch's. Yields None if it is not."""
    if not isinstance(generator, torch.Generator):
        yield None
        return
    state = generator.get_state()
    try:
        yield generator
    finally:
        generator.set_state(state)


class EvaluationBatches:
    """A DataLoader without its length, which changes with the workers while the trainer asks for it once."""

    def __init__(self, loader: DataLoader[Any], placed: Placed) -> None:
        self.loader = loader
        self.dataset = loader.dataset
        self._placed = placed

    def __iter__(self) -> Iterator[Any]:
        return map(self._placed, self.loader)


class UndividedBatches(EvaluationBatches):
    """A DataLoader with all of its attributes, of which only the batches are placed."""

    def __len__(self) -> int:
        return len(self.loader)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.loader, name)


def _whole(sampler: Any) -> Any:
    """Returns the sampler of the whole order; a DistributedSampler gives one worker's part, which would be divided once
    more. Raises UnsupportedInElasticJob for one with an order of its own."""
    if not isinstance(sampler, DistributedSampler):
        return sampler
    if type(sampler).__iter__ is not DistributedSampler.__iter__:
        raise UnsupportedInElasticJob(
            f"the evaluation loader has a {type(sampler).__name__}, a DistributedSampler: it gives one worker's part, "
            "and the loader is divided among the workers there are; pass the sampler of the whole order"
        )
    dataset: Any = sampler.dataset
    return RandomSampler(dataset) if sampler.shuffle else SequentialSampler(dataset)


def shared(dataloader: object, place: Place, placed: Placed | None = None) -> object:
    """Returns the loader over this worker's share. A loader that can't be divided has all its samples on each worker.

    placed(batch): what the script gets for a batch. None for the batch itself; a loader that can't be divided is then
    returned as it is. Raises UnsupportedInElasticJob.
    """
    if not isinstance(dataloader, DataLoader):
        return dataloader
    if isinstance(dataloader.dataset, IterableDataset) or type(dataloader.batch_sampler) is not BatchSampler:
        return dataloader if placed is None else UndividedBatches(dataloader, placed)
    batches = SharedBatches(_whole(dataloader.sampler), dataloader.batch_size or 1, place)
    divided = DataLoader(
        dataloader.dataset,
        batch_sampler=batches,
        **reading_settings(dataloader),
        persistent_workers=dataloader.persistent_workers,
    )
    return EvaluationBatches(divided, placed or (lambda batch: batch))
