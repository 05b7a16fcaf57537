"""Defines how an epoch divides into global batches, and a batch into the workers' shares.

Owns that interface, and the plain form: batches of one size, even shares (partition.py). The form by
cost is balancing/balanced_division.py, the one in a sampler's order sampled_division.py, that of streams
stream_division.py.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol

import torch

from bagua_core.communication.step_interface import Stateful
from bagua_core.data.partition import (
    BatchSplit,
    batch_count,
    batch_split,
    epoch_order,
    global_batch,
)
from bagua_core.data.prefetch import BatchKey

# the loader's own epoch, the one that prefetching has reached, and the one the ledger still looks at
KEPT_EPOCHS = 3


class Piece(NamedTuple):
    """A micro-batch of one worker: indices of the data set, maybe none, and the weight of its mean gradient."""

    indices: list[int]
    weight: float


NO_PIECE = Piece([], 0.0)  # of a worker without a share


class DivisionSettings(NamedTuple):
    """The settings of a loader that its division needs; see ElasticDataLoader."""

    seed: int
    shuffle: bool
    drop_last: bool
    global_batch_size: int
    max_local_batch_size: int | None


class Division(Protocol):
    orders_ahead: bool = True
    """Whether the order of an epoch is known before the epoch begins."""

    orders_change: Callable[[], None] = staticmethod(lambda: None)
    """Called when indices that were asked for may be other ones now."""

    def travelling(self) -> Mapping[str, Stateful]:
        """Returns what of the division is the job's state, by the name under which it is registered."""
        return {}

    def prepare(self) -> None:
        """Does the slow preparation before any worker of the job waits for it."""

    def batch_count(self, epoch: int) -> int: ...

    def known_steps(self, epochs: int) -> int:
        """Returns the steps of so many epochs; 0 where this is not known before the epochs have begun."""
        return 0

    def has_batch(self, epoch: int, batch: int) -> bool:
        """Tells whether the epoch has this batch. Known for the batch behind one that was read."""
        return batch < self.batch_count(epoch)

    def may_have_batch(self, epoch: int, batch: int) -> bool:
        """Tells whether the epoch may have this batch, also on a worker that lacks the job's state so far."""
        return self.has_batch(epoch, batch)

    def samples(self, epoch: int, batch: int) -> int:
        """Returns the samples of the batch, over all workers; the last batch of an epoch may be short.

        Known for a batch that was used; of a stream, on a worker that had no share, once it has copied the job's state.
        """

    def samples_before(self, epoch: int, batch: int) -> int:
        """Returns the samples of all batches before this one, over all epochs.

        Raises TypeError where they are not known beforehand.
        """
        raise TypeError(
            "committed_samples needs a map-style data set without sampler and balance; count batches by loader.step"
        )

    def read(self, epoch: int, batch: int) -> None:
        """Prepares the batch. Called before its pieces are used, but not on a worker without a share."""
        return None

    def micro_batches(self, epoch: int, batch: int, parts: int, part: int | None = None) -> int:
        """Returns the number of micro-batches of worker `part` of `parts`; part None: a worker without a share.

        It is the same on every worker, also on one that has no state yet, except where workers own virtual shards.
        """

    def piece(self, key: BatchKey) -> Piece:
        """Returns the micro-batch `key`, whose active_index is not None."""

    def filler(self, epoch: int) -> list[int]:
        """Returns the indices of two samples, for batch normalization refuses to train on one."""

    def fingerprint(self) -> dict[str, str]: ...


def indices_of_share(division: Division, first: BatchKey) -> list[int]:
    """Returns the data set's indices in all micro-batches of a worker's share. first: the key of the first of them."""
    index, parts, epoch, batch, _ = first
    micro_batches = range(division.micro_batches(epoch, batch, parts, index))
    return [i for micro in micro_batches for i in division.piece(first._replace(micro=micro)).indices]


class EvenDivision(Division):
    """Divides an epoch into batches of `global_batch_size` samples, and a batch into shares of equal size."""

    def __init__(self, length: int, settings: DivisionSettings) -> None:
        self._length = length
        self._size = settings.global_batch_size
        self._most_local = settings.max_local_batch_size
        self._batch_count = batch_count(length, settings.global_batch_size, settings.drop_last)
        order_of = functools.partial(epoch_order, settings.seed, length=length, shuffle=settings.shuffle)
        self._order = functools.lru_cache(KEPT_EPOCHS)(order_of)
        self._drop_last = settings.drop_last

    @property
    def used_length(self) -> int:
        """The number of places of an epoch that are used."""
        return self._batch_count * self._size if self._drop_last else self._length

    def samples_before(self, epoch: int, batch: int) -> int:
        """Returns the samples of all batches before this one, over all epochs."""
        return epoch * self.used_length + min(batch * self._size, self.used_length)

    def order(self, epoch: int) -> torch.Tensor:
        """Returns the data set's indices by place."""
        return self._order(epoch)

    def prepare(self) -> None:
        pass

    def batch_count(self, epoch: int) -> int:
        return self._batch_count

    def known_steps(self, epochs: int) -> int:
        return epochs * self._batch_count

    def micro_batches(self, epoch: int, batch: int, parts: int, part: int | None = None) -> int:
        return self._split(epoch, batch, parts).micro_batches

    def _split(self, epoch: int, batch: int, parts: int) -> BatchSplit:
        return batch_split(self.samples(epoch, batch), parts, self._size, self._most_local)

    def piece(self, key: BatchKey) -> Piece:
        index, parts, epoch, batch, micro = key
        assert index is not None
        samples = self.samples(epoch, batch)
        places = batch_split(samples, parts, self._size, self._most_local).places(index, micro)
        return Piece(self.indices(epoch, batch, places), len(places) / samples)

    def indices(self, epoch: int, batch: int, places: range) -> list[int]:
        """Returns the data set's indices at these places of the batch."""
        found: list[int] = global_batch(self._order(epoch), batch, self._size)[
            places.start : places.stop
        ].tolist()
        return found

    def filler(self, epoch: int) -> list[int]:
        return self._order(epoch)[:2].tolist()

    def fingerprint(self) -> dict[str, str]:
        order = self._order(0)
        # a torch that shuffles otherwise would train on other samples than it claims
        return {"order_of_epoch_0": f"{zlib.crc32(bytes(str(order[:1024].tolist()), 'ascii')):08x}"}

    def samples(self, epoch: int, batch: int) -> int:
        """Returns the samples of the batch; the last one of an epoch may be short."""
        return max(0, min(self._size, self._length - batch * self._size))
