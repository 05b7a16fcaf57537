"""Turns the trainer's train loader into an elastic one: the same data set, in global batches.

Refuses loaders that an elastic job cannot have.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader

from bagua_core.data.elastic_loader import ElasticDataLoader
from bagua_core.data.stream_division import is_stream
from bagua_core.integrations.loader_settings import UnsupportedInElasticJob, order_of, reading_settings


class TrainBatches:
    """The batches that the trainer iterates over in place of the script's loader.

    Its length is the number of steps of an epoch, and does not depend on the workers there are. A stream has none, also
    where its data set has a length: its epoch ends where its items do.
    """

    def __init__(self, loader: ElasticDataLoader) -> None:
        self.loader = loader
        self.dataset = loader.dataset
        self.is_stream = is_stream(loader.dataset)
        self._draw_begins: Any = None

    def on_draw(self, draw_begins: Any) -> None:
        """Sets the hook of a draw. draw_begins(): called when a batch is drawn, before the trainer counts it."""
        self._draw_begins = draw_begins

    def __len__(self) -> int:
        if self.is_stream:
            raise TypeError(f"{type(self.dataset).__name__} is a stream: its epochs end where its items do")
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        if self.is_stream and self._draw_begins is None:
            return  # the trainer reads ahead of a stream before it begins, and a draw begins a step
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
    """Returns the elastic batches of a trainer's loader.

    global_batch_size: None for the loader's batch size times `workers`, as the trainer's arguments name them.

    Raises UnsupportedInElasticJob.
    """
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
            **order_of(dataloader, "strategy='bagua'"),
            drop_last=dataloader.drop_last,
            **reading_settings(dataloader),
        )
    )
