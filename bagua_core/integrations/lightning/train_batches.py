"""The trainer's train loader as an elastic one: the same data set, in global batches.

Owns the translation of a DataLoader's settings, and refuses what an elastic job cannot have.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler

from bagua_core.data.elastic_loader import ElasticDataLoader
from bagua_core.data.stream_division import is_stream
from bagua_core.errors import UserError


class UnsupportedInElasticJob(UserError, ValueError):
    """A setting of the script that does not go with workers that join and leave. The text names the alternative."""


class TrainBatches:
    """What the trainer iterates in place of the script's loader.

    Its length is the number of steps of an epoch, and does not depend on the workers there are.
    """

    def __init__(self, loader: ElasticDataLoader) -> None:
        self.loader = loader
        self.dataset = loader.dataset
        self._draw_begins: Any = None

    def on_draw(self, draw_begins: Any) -> None:
        """draw_begins(): called when a batch is drawn, before the trainer counts it."""
        self._draw_begins = draw_begins

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        for batch in self.loader:
            if self._draw_begins is not None:
                self._draw_begins()
            yield batch
            del batch

    @property
    def epoch(self) -> int:
        return self.loader.position()["epoch"]

    @property
    def batch(self) -> int:
        """The number of the next batch in its epoch, or of the one under way."""
        return self.loader.position()["batch"]


def elastic(dataloader: object, global_batch_size: int | None, workers: int) -> TrainBatches:
    """global_batch_size: None for the loader's batch size times `workers`, as the trainer's arguments name them.

    Raises UnsupportedInElasticJob.
    """
    dataset = getattr(dataloader, "dataset", None)
    if is_stream(dataset):
        raise UnsupportedInElasticJob(
            f"strategy='bagua' trains from data sets with __getitem__, and {type(dataset).__name__} is a "
            "stream: use bagua_core.ElasticDataLoader in a loop of your own"
        )
    if isinstance(dataloader, ElasticDataLoader):
        return TrainBatches(dataloader)
    if not isinstance(dataloader, DataLoader):
        raise UnsupportedInElasticJob(
            f"strategy='bagua' trains from a torch DataLoader or a bagua_core.ElasticDataLoader, not from "
            f"{type(dataloader).__name__}"
        )
    return TrainBatches(
        ElasticDataLoader(
            dataloader.dataset,
            global_batch_size or (dataloader.batch_size or 1) * workers,
            seed=int(os.environ.get("PL_GLOBAL_SEED", "0")),  # what lightning.seed_everything() sets
            **_order_of(dataloader),
            drop_last=dataloader.drop_last,
            **reading_settings(dataloader),
        )
    )


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


def _order_of(dataloader: DataLoader[Any]) -> dict[str, Any]:
    """The order of the samples, as arguments of ElasticDataLoader, which checks a sampler of the script itself.

    Raises UnsupportedInElasticJob.
    """
    if type(dataloader.batch_sampler) is not BatchSampler:
        raise UnsupportedInElasticJob(
            f"strategy='bagua' divides batches itself, so {_kind(dataloader.batch_sampler)} as batch_sampler can't be "
            "used; give the DataLoader a batch_size"
        )
    sampler: Any = dataloader.sampler
    if type(sampler) is SequentialSampler:
        return {"shuffle": False}
    draws_all_once = type(sampler) is RandomSampler and not sampler.replacement
    if draws_all_once and sampler.num_samples == len(sampler.data_source):
        return {"shuffle": True}
    return {"sampler": sampler}


def _kind(thing: object) -> str:
    return type(thing).__name__
