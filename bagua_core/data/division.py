"""Defines how an epoch divides into global batches, and a batch into the workers' shares.

Owns that interface, and the plain form: batches of one size, shares that differ by at most one sample. The form by
cost is balancing/balanced_division.py, the one in a sampler's order sampled_division.py, that of streams
stream_division.py.
"""

from __future__ import annotations

import functools
import zlib
from typing import NamedTuple, Protocol

from bagua_core.data.partition import (
    batch_count,
    epoch_order,
    global_batch,
    global_batch_range,
    micro_batch_count,
    micro_share,
)
from bagua_core.data.prefetch import BatchKey

# the loader's own epoch, the one that prefetching has reached, and the one the ledger still looks at
KEPT_EPOCHS = 3


class Piece(NamedTuple):
    """A micro-batch of one worker: indices of the data set, maybe none, and what its mean gradient counts."""

    indices: list[int]
    weight: float


class DivisionSettings(NamedTuple):
    """Of the loader; see ElasticDataLoader."""

    seed: int
    shuffle: bool
    drop_last: bool
    global_batch_size: int
    max_local_batch_size: int | None


class Division(Protocol):
    def prepare(self) -> None:
        """Does the slow preparation before any worker of the job waits for it."""

    def batch_count(self, epoch: int) -> int: ...

    def has_batch(self, epoch: int, batch: int) -> bool:
        """Known for the batch behind one that was read."""
        return batch < self.batch_count(epoch)

    def read(self, epoch: int, batch: int) -> None:
        """Called before pieces of the batch are used, but not on a worker without a share."""
        return None

    def micro_batches(self, epoch: int, batch: int, parts: int) -> int:
        """The same on every worker, also on one that has no state yet."""

    def piece(self, key: BatchKey) -> Piece:
        """key.active_index is not None."""

    def filler(self, epoch: int) -> list[int]:
        """Two samples, for batch normalization refuses to train on one."""

    def fingerprint(self) -> dict[str, str]: ...


class EvenDivision(Division):
    """Batches of `global_batch_size` samples, each worker's share as large as the others'."""

    def __init__(self, length: int, settings: DivisionSettings) -> None:
        self._length = length
        self._size = settings.global_batch_size
        self._most_local = settings.max_local_batch_size
        self._batch_count = batch_count(length, settings.global_batch_size, settings.drop_last)
        order_of = functools.partial(epoch_order, settings.seed, length=length, shuffle=settings.shuffle)
        self._order = functools.lru_cache(KEPT_EPOCHS)(order_of)

    def prepare(self) -> None:
        pass

    def batch_count(self, epoch: int) -> int:
        return self._batch_count

    def micro_batches(self, epoch: int, batch: int, parts: int) -> int:
        return micro_batch_count(self._samples(epoch, batch), parts, self._most_local)

    def piece(self, key: BatchKey) -> Piece:
        assert key.active_index is not None
        samples = self._samples(key.epoch, key.batch)
        micro_batches = micro_batch_count(samples, key.active_count, self._most_local)
        places = micro_share(samples, key.active_count, key.active_index, micro_batches, key.micro)
        indices = global_batch(self._order(key.epoch), key.batch, self._size)
        return Piece(indices[places.start : places.stop].tolist(), len(places) / samples)

    def filler(self, epoch: int) -> list[int]:
        return self._order(epoch)[:2].tolist()

    def fingerprint(self) -> dict[str, str]:
        order = self._order(0)
        # a torch that shuffles otherwise would train on other samples than it claims
        return {"order_of_epoch_0": f"{zlib.crc32(bytes(str(order[:1024].tolist()), 'ascii')):08x}"}

    def _samples(self, epoch: int, batch: int) -> int:
        return len(global_batch_range(self._length, batch, self._size))
