"""Divides the epochs of a stream: the i-th item of an epoch is place i, and batch b has the places from b * B on.

Owns that arithmetic, whose only unknown is where an epoch ends, and what is refused; stream_reader.py finds the end and
has the items. Invariant: the number of micro-batches is that of a full batch, also in a short one, so that a worker
that has not read the batch knows it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from bagua_core.communication.step_interface import Stateful
from bagua_core.data.division import NO_PIECE, Division, DivisionSettings, Piece
from bagua_core.data.partition import BatchSplit, batch_count, micro_batch_count
from bagua_core.data.prefetch import BatchKey
from bagua_core.data.stream_reader import StreamReader


def is_stream(dataset: Any) -> bool:
    return isinstance(dataset, IterableDataset) or (
        hasattr(dataset, "__iter__") and not hasattr(dataset, "__getitem__")
    )


def refuse(dataset: Any, shuffle: bool | None, num_workers: int, sampler: Any, balance: Any) -> None:
    """Checks the arguments of a loader over a stream. Raises TypeError or ValueError for what does not go with one."""
    kind = type(dataset).__name__
    if hasattr(dataset, "__next__") and not isinstance(dataset, IterableDataset):
        raise TypeError(
            f"{kind} is an iterator, which has one epoch and no beginning to go back to; pass an object whose __iter__ "
            "begins an epoch (for a node of torchdata, torchdata.nodes.Loader(node))"
        )
    if isinstance(dataset, DataLoader) and dataset.batch_sampler is not None:
        raise TypeError(
            f"{kind} makes batches, and an elastic job divides samples; pass its data set, ElasticDataLoader("
            "loader.dataset, global_batch_size), or a loader with batch_size=None"
        )
    if shuffle:
        raise ValueError(
            f"shuffle=True: {kind} is a stream, which has its own order; shuffle in the data set"
        )
    if num_workers:
        raise ValueError(
            f"num_workers={num_workers}: {kind} is a stream, which every worker reads in its own process; leave it "
            "out, or let the data set read ahead (torchdata.nodes.Prefetcher, "
            "torchdata.stateful_dataloader.StatefulDataLoader with batch_size=None)"
        )
    for name, value in (("sampler", sampler), ("balance", balance)):
        if value is not None:
            raise ValueError(f"{name} does not go with {kind}, a stream: its order is that of its items")


class StreamDivision(Division):
    def __init__(self, dataset: Any, settings: DivisionSettings, sample_seed: int | None) -> None:
        """Takes a stream. sample_seed: None leaves random numbers that are drawn while items are read to the script."""
        self._dataset = dataset
        self._size = settings.global_batch_size
        self._drop_last = settings.drop_last
        self._most_local = settings.max_local_batch_size
        self.reader = StreamReader(dataset, self._size, self._drop_last, sample_seed)

    def travelling(self) -> Mapping[str, Stateful]:
        return {"bagua.stream": self.reader}

    def prepare(self) -> None:
        self.reader.prepare()

    def batch_count(self, epoch: int) -> int:
        try:
            length = len(self._dataset)
        except TypeError as error:
            raise TypeError(
                f"{type(self._dataset).__name__} has no length, so the number of steps is not known; give it a "
                "__len__, or a schedule its number of steps, and decide by loader.step"
            ) from error
        return batch_count(length, self._size, self._drop_last)

    def has_batch(self, epoch: int, batch: int) -> bool:
        end = self.reader.ends.get(epoch)
        return end is None or batch * self._size < end

    def read(self, epoch: int, batch: int) -> None:
        self.reader.read(epoch, batch)

    def micro_batches(self, epoch: int, batch: int, parts: int, part: int | None = None) -> int:
        return micro_batch_count(self._size, parts, self._most_local)

    def samples(self, epoch: int, batch: int) -> int:
        first = batch * self._size
        # a batch whose epoch has no known end was a full one: its last is only used once it was read
        return min(self._size, self.reader.ends.get(epoch, first + self._size) - first)

    def piece(self, key: BatchKey) -> Piece:
        assert key.active_index is not None
        first, samples = key.batch * self._size, self.samples(key.epoch, key.batch)
        # in a short batch those that have samples come first, as of other data; the rest of a full one's are empty
        split = BatchSplit(samples, key.active_count, self._size, self._most_local)
        if key.micro >= split.micro_batches:
            return NO_PIECE
        places = split.places(key.active_index, key.micro)
        return Piece([first + place for place in places], len(places) / samples)

    def filler(self, epoch: int) -> list[int]:
        return self.reader.fillers

    def fingerprint(self) -> dict[str, str]:
        return {"stream": type(self._dataset).__name__, "first_batch": f"{self.reader.first_digest:08x}"}
