"""Seeds the random numbers of a sample's augmentation from (seed, epoch, sample).

A sample is augmented alike in every worker process and generation. What collate_fn draws follows from the last sample
of its batch. Seeds Python's, numpy's (if imported) and torch's CPU generator; not CUDA's. Knows nothing of ranks or
positions.
"""

from __future__ import annotations

import os
import random
import sys
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.data import ConcatDataset, Subset, TensorDataset

from bagua_contract.environment import worker_id_in
from bagua_core.data.partition import mixed_seed


def has_no_randomness(dataset: object) -> bool:
    """Tells whether seeding would be wasted: the samples are tensors that are only indexed."""
    # exact types: a subclass may well augment
    if type(dataset) is TensorDataset:
        return True
    if type(dataset) is Subset:
        return has_no_randomness(dataset.dataset)
    if type(dataset) is ConcatDataset:
        return all(has_no_randomness(part) for part in dataset.datasets)
    return False


def own_process_seed(seed: int) -> int:
    """Returns a seed for processes whose random numbers no sample seeds, different on each worker of a job.

    Draws nothing from the script's random numbers, and follows from the seed that the script gave them.
    """
    worker = zlib.crc32(worker_id_in(os.environ).encode())
    return mixed_seed(seed, torch.initial_seed(), worker)


def seed_random_sources(value: int) -> None:
    """Seeds Python's, NumPy's (if imported) and torch's CPU generator. value: 64 bits.

    Leaves CUDA's generators alone, which torch.manual_seed would not.
    """
    random.seed(value)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(value & 0xFFFFFFFF)
    torch.default_generator.manual_seed(value & 0x7FFFFFFFFFFFFFFF)


@contextmanager
def random_sources_kept() -> Iterator[None]:
    """Restores the states of the random sources at its end, so that the script's own random numbers do not change."""
    numpy = sys.modules.get("numpy")
    python_state = random.getstate()
    numpy_state = None if numpy is None else numpy.random.get_state()
    torch_state = torch.default_generator.get_state()
    try:
        yield
    finally:
        random.setstate(python_state)
        if numpy is not None:
            numpy.random.set_state(numpy_state)
        torch.default_generator.set_state(torch_state)


def load_samples(dataset: Any, indices: Sequence[int]) -> list[Any]:
    """Returns the samples, read as torch's own loader does: in one call where the data set offers it."""
    together = getattr(dataset, "__getitems__", None)
    if together is not None:
        return together(list(indices))  # type: ignore[no-any-return]
    return [dataset[index] for index in indices]


def load_seeded_samples(dataset: Any, seed: int, epoch: int, indices: Sequence[int]) -> list[Any]:
    """Returns the samples, each read under its own seed: one by one even where the data set has `__getitems__`.

    So what a sample draws does not depend on its neighbours in the share. Samples that draw nothing are read together.
    Afterwards the random sources are as the last sample's seed leaves them.
    """
    epoch_seed = mixed_seed(seed, epoch)
    if has_no_randomness(dataset):
        samples = load_samples(dataset, indices)
        if indices:
            # Of what is drawn next, as by collate_fn
            seed_random_sources(mixed_seed(epoch_seed, indices[-1]))
        return samples
    together = getattr(dataset, "__getitems__", None)
    samples = []
    for index in indices:
        seed_random_sources(mixed_seed(epoch_seed, index))
        samples.append(dataset[index] if together is None else together([index])[0])
    return samples
