"""The train loader that ElasticAccelerator.prepare() returns: an elastic one, whose batches are on the device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import DataLoader

from bagua_core.data.elastic_loader import ElasticDataLoader
from bagua_core.data.prefetch import BatchKey
from bagua_core.integrations.loader_settings import UnsupportedInElasticJob, order_of, reading_settings


class TrainLoader(ElasticDataLoader):
    """An ElasticDataLoader whose batches are placed, and whose epochs come from `epochs` alone.

    placed(batch): what the script gets for a batch. ranks_changed(): called after each boundary.
    """

    def __init__(
        self,
        *arguments: Any,
        placed: Callable[[Any], Any],
        ranks_changed: Callable[[], None],
        **settings: Any,
    ) -> None:
        super().__init__(*arguments, **settings)
        self._placed = placed
        self._ranks_changed = ranks_changed
        self._read_batches: list[Any] = []  # this worker's micro-batches of the step under way
        self.step_batches: list[Any] = []  # those of them that have samples; one filler if none has any

    def __iter__(self) -> Iterator[Any]:
        if self._announced is None:
            raise UnsupportedInElasticJob(
                "the train loader is iterated outside of its epochs, whose number a worker that joins can't know: "
                "write `for epoch in loader.epochs(count)` in place of `range(count)`"
            )
        return self._placed_batches()

    def _placed_batches(self) -> Iterator[Any]:
        for batch in super().__iter__():
            yield self._placed(batch)

    def _read(self, key: BatchKey) -> Any:
        """Returns the micro-batch `key`. A step's micro-batches are read together, before it begins: a mean over tokens
        counts those of all."""
        if key.micro == 0:
            count = self._division.micro_batches(key.epoch, key.batch, key.active_count)
            keys = [key._replace(micro=micro) for micro in range(count)]
            self._read_batches = [super(TrainLoader, self)._read(k) for k in keys]
            own = [batch for k, batch in zip(keys, self._read_batches, strict=True) if self._own_indices(k)]
            self.step_batches = own or self._read_batches[:1]
        return self._read_batches[key.micro]

    def _take_boundary(self, goes_on: bool = False, confirmed: bool = False) -> None:
        super()._take_boundary(goes_on, confirmed)
        self._ranks_changed()


def train_loader(
    dataloader: DataLoader[Any],
    global_batch_size: int | None,
    seed: int,
    placed: Callable[[Any], Any],
    ranks_changed: Callable[[], None],
    max_local_batch_size: int | None = None,
) -> TrainLoader:
    """Returns the elastic loader that takes the place of the script's.

    global_batch_size: None for the loader's batch size. The others: see TrainLoader and ElasticDataLoader.

    Raises UnsupportedInElasticJob.
    """
    return TrainLoader(
        dataloader.dataset,
        dataloader.batch_size or 1 if global_batch_size is None else global_batch_size,
        seed=seed,
        max_local_batch_size=max_local_batch_size,
        placed=placed,
        ranks_changed=ranks_changed,
        **order_of(dataloader, "ElasticAccelerator"),
        drop_last=dataloader.drop_last,
        **reading_settings(dataloader),
    )
