"""Divides batches into virtual shards, which whole workers own: the division of deterministic jobs.

A shard's samples follow from the batch and the number of shards alone; only its owner follows from the workers.
"""

from __future__ import annotations

from collections.abc import Mapping

from bagua_core.communication.shards.shard_tree import leaves_of
from bagua_core.communication.step_interface import Stateful
from bagua_core.data.division import Division, EvenDivision, Piece
from bagua_core.data.partition import share
from bagua_core.data.prefetch import BatchKey


class ShardDivision(Division):
    """Divides each batch of `inner` into at most `most_shards` shards that differ by at most one sample."""

    def __init__(self, inner: EvenDivision, most_shards: int) -> None:
        self._inner = inner
        self.orders_ahead = inner.orders_ahead
        self._most_shards = most_shards

    def prepare(self) -> None:
        self._inner.prepare()

    def travelling(self) -> Mapping[str, Stateful]:
        return self._inner.travelling()

    def read(self, epoch: int, batch: int) -> None:
        self._inner.read(epoch, batch)

    def batch_count(self, epoch: int) -> int:
        return self._inner.batch_count(epoch)

    def known_steps(self, epochs: int) -> int:
        return self._inner.known_steps(epochs)

    def has_batch(self, epoch: int, batch: int) -> bool:
        return self._inner.has_batch(epoch, batch)

    def may_have_batch(self, epoch: int, batch: int) -> bool:
        return self._inner.may_have_batch(epoch, batch)

    def samples(self, epoch: int, batch: int) -> int:
        return self._inner.samples(epoch, batch)

    def samples_before(self, epoch: int, batch: int) -> int:
        return self._inner.samples_before(epoch, batch)

    def shards(self, epoch: int, batch: int) -> int:
        """Returns the number of shards of this batch; a short batch may have fewer samples than `most_shards`."""
        return min(self._most_shards, self._inner.samples(epoch, batch))

    def shard_of(self, key: BatchKey) -> int | None:
        """Returns the shard that the micro-batch is; None for a worker without any."""
        if key.active_index is None:
            return None
        own = leaves_of(self.shards(key.epoch, key.batch), key.active_count, key.active_index)
        return own[key.micro] if own else None

    def micro_batches(self, epoch: int, batch: int, parts: int, part: int | None = None) -> int:
        """Returns the number of shards of worker `part`, or 1 for a filler; workers may have different numbers."""
        if part is None:
            return 1
        return max(1, len(leaves_of(self.shards(epoch, batch), parts, part)))

    def piece(self, key: BatchKey) -> Piece:
        shard = self.shard_of(key)
        if shard is None:
            return Piece([], 0.0)
        samples = self._inner.samples(key.epoch, key.batch)
        places = share(samples, self.shards(key.epoch, key.batch), shard)
        return Piece(self._inner.indices(key.epoch, key.batch, places), len(places) / samples)

    def filler(self, epoch: int) -> list[int]:
        return self._inner.filler(epoch)

    def fingerprint(self) -> dict[str, str]:
        return self._inner.fingerprint()
