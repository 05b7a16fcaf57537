"""Translates a torch DataLoader's settings for the elastic loader that takes its place; for every integration."""

from __future__ import annotations

import os
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler

from bagua_contract.environment import WorkerEnvironment
from bagua_core.algorithms import Algorithm, find_algorithm
from bagua_core.data.stream_division import is_stream
from bagua_core.errors import UserError


class UnsupportedInElasticJob(UserError, ValueError):
    """A setting of the script does not go with workers that join and leave. The text names the alternative."""


def algorithm_of_steps(algorithm: str | Algorithm) -> Algorithm:
    """Returns the algorithm by its name.

    Raises UnsupportedInElasticJob where workers take different numbers of local steps, for trainers count steps by the
    job's position, and in a deterministic job, whose shards they do not know.
    """
    if WorkerEnvironment.is_present(os.environ) and WorkerEnvironment.decode(os.environ).virtual_shards:
        raise UnsupportedInElasticJob(
            "--deterministic needs a loop over bagua.ElasticDataLoader, whose batches are virtual shards; "
            "this trainer has a loop of its own, which counts batches. Leave --deterministic out"
        )
    found = find_algorithm(algorithm)
    if found.round_steps is not None:
        raise UnsupportedInElasticJob(
            f'{found.described} commits rounds, and trainers count steps that all workers take; use it with unit="step"'
        )
    return found


def reading_settings(dataloader: DataLoader[Any]) -> dict[str, Any]:
    """Returns how the script's loader reads samples, as arguments of the loader that takes its place."""
    return {
        "num_workers": dataloader.num_workers,
        "collate_fn": dataloader.collate_fn,
        "pin_memory": dataloader.pin_memory,
        "timeout": dataloader.timeout,
        "worker_init_fn": dataloader.worker_init_fn,
        "multiprocessing_context": dataloader.multiprocessing_context,
        "prefetch_factor": dataloader.prefetch_factor if dataloader.num_workers else None,
    }


def order_of(dataloader: DataLoader[Any], who: str) -> dict[str, Any]:
    """Returns the order of the samples, as arguments of ElasticDataLoader, which checks a sampler of the script itself.

    who: the integration, as the error names it. A stream has its own order.
    Raises UnsupportedInElasticJob.
    """
    if is_stream(dataloader.dataset):
        if dataloader.batch_size is None:
            raise UnsupportedInElasticJob(
                f"{who} makes batches of the items of {type(dataloader.dataset).__name__}, a stream; give the "
                "DataLoader a batch_size, and have the stream yield single items"
            )
        return {}
    if type(dataloader.batch_sampler) is not BatchSampler:
        raise UnsupportedInElasticJob(
            f"{who} divides batches itself, so {type(dataloader.batch_sampler).__name__} as batch_sampler can't be "
            "used; give the DataLoader a batch_size"
        )
    sampler: Any = dataloader.sampler
    if type(sampler) is SequentialSampler:
        return {"shuffle": False}
    draws_all_once = type(sampler) is RandomSampler and not sampler.replacement
    if draws_all_once and sampler.num_samples == len(sampler.data_source):
        return {"shuffle": True}
    return {"sampler": sampler}
