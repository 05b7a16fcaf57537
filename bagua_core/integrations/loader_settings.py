"""Translates a torch DataLoader's settings for the elastic loader that takes its place; for every integration."""

from __future__ import annotations

from typing import Any

from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler

from bagua_core.errors import UserError


class UnsupportedInElasticJob(UserError, ValueError):
    """A setting of the script that does not go with workers that join and leave. The text names the alternative."""


def reading_settings(dataloader: DataLoader[Any]) -> dict[str, Any]:
    """How the script's loader reads samples, as arguments of the one that takes its place."""
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
    """The order of the samples, as arguments of ElasticDataLoader, which checks a sampler of the script itself.

    who: the integration, as the error names it.
    Raises UnsupportedInElasticJob.
    """
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
