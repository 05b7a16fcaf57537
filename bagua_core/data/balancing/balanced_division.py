"""The loader's Division by cost: shares of a batch have equal cost instead of equal size.

Puts together the batches (epoch_batches.py), the shares (fair_shares.py) and the complexities; the loader sees it
through Division. Batches follow from (seed, epoch, complexities) alone, so position and steps of an epoch mean the
same in any world. Shares also follow from the number of workers.
"""

from __future__ import annotations

import functools
import zlib
from typing import Any

from bagua_core.data.balancing.balance import Balance
from bagua_core.data.balancing.complexities import Complexities
from bagua_core.data.balancing.epoch_batches import EpochBatches, Limits, epoch_batches
from bagua_core.data.balancing.fair_shares import fair_shares
from bagua_core.data.division import KEPT_EPOCHS, Division, DivisionSettings, Piece
from bagua_core.data.partition import BatchSplit, epoch_order
from bagua_core.data.prefetch import BatchKey

_KEPT_SPLITS = 64  # those loaded ahead, and the few that the ledger still looks at
_SAMPLED = 1024  # complexities that the fingerprint follows from

_Split = list[list[Piece]]  # by part and micro-batch


class BalancedDivision(Division):
    def __init__(self, dataset: Any, balance: Balance, settings: DivisionSettings) -> None:
        """Creates the division. Raises ValueError for drop_last with a budget, and what Complexities raises."""
        if balance.budget is not None and settings.drop_last:
            raise ValueError(
                "drop_last=True does not go with a budget: its batches have no size that the last one could fall "
                "short of"
            )
        self._length = len(dataset)
        self._balance = balance
        self._settings = settings
        self._limits = Limits(settings.global_batch_size, balance.budget, balance.similar_batches)
        self._complexities = Complexities(
            dataset,
            balance.complexity_fn,
            known=balance.complexities,
            seed=settings.seed,
            cache_dir=balance.cache_dir,
            cache_key=balance.cache_key,
        )
        self._batches = functools.lru_cache(KEPT_EPOCHS)(self._made_batches)
        self._split = functools.lru_cache(_KEPT_SPLITS)(self._made_split)

    def prepare(self) -> None:
        if self._limits.needs_complexities or self._complexities.is_kept:
            self._complexities.complete()

    def batch_count(self, epoch: int) -> int:
        return len(self._batches(epoch))

    def micro_batches(self, epoch: int, batch: int, parts: int, part: int | None = None) -> int:
        return self._even_split(epoch, batch, parts).micro_batches

    def _even_split(self, epoch: int, batch: int, parts: int) -> BatchSplit:
        samples, most_local = self.samples(epoch, batch), self._settings.max_local_batch_size
        # with a budget no batch is a full one
        full = samples if self._balance.budget is not None else self._settings.global_batch_size
        return BatchSplit(samples, parts, full, most_local)

    def samples(self, epoch: int, batch: int) -> int:
        return self._batches(epoch).size(batch)

    def piece(self, key: BatchKey) -> Piece:
        assert key.active_index is not None
        return self._split(key.epoch, key.batch, key.active_count)[key.active_index][key.micro]

    def filler(self, epoch: int) -> list[int]:
        return self._batches(epoch).order[:2].tolist()

    def fingerprint(self) -> dict[str, str]:
        batches = self._batches(0)
        sampled = ",".join(value.hex() for value in self._sampled())
        asked = self._balance
        starts = [batches.size(batch) for batch in range(min(1024, len(batches)))]
        return {
            "balance": f"budget {asked.budget}, {asked.similar_batches} similar batches, mean over {asked.mean_over}",
            "complexities": f"{zlib.crc32(sampled.encode()):08x}",
            "order_of_epoch_0": f"{zlib.crc32(f'{batches.order[:1024].tolist()} {starts}'.encode()):08x}",
        }

    def _sampled(self) -> list[float]:
        return self._complexities.of(
            epoch_order(self._settings.seed, 0, self._length, self._settings.shuffle)[:_SAMPLED].tolist()
        )

    def _made_batches(self, epoch: int) -> EpochBatches:
        if self._limits.needs_complexities:
            self._complexities.complete()
        return epoch_batches(
            epoch_order(self._settings.seed, epoch, self._length, self._settings.shuffle),
            self._complexities.of,
            self._limits,
            seed=self._settings.seed,
            epoch=epoch,
            shuffle=self._settings.shuffle,
            drop_last=self._settings.drop_last,
        )

    def _made_split(self, epoch: int, batch: int, parts: int) -> _Split:
        indices = self._batches(epoch).indices(batch)
        complexities = self._complexities.of(indices)
        even = self._even_split(epoch, batch, parts)
        micro_batches = even.micro_batches
        most = (
            None
            if self._settings.max_local_batch_size is None
            else micro_batches * self._settings.max_local_batch_size
        )
        # two in a micro-batch where there are enough: batch normalization refuses to train on one
        least = min(2 * micro_batches, len(indices) // even.sharing)
        weights = [1.0] * len(indices) if self._balance.mean_over == "samples" else complexities
        total = _total(weights)
        if total == 0.0:
            weights, total = [1.0] * len(indices), float(len(indices))
        split = []
        shares = fair_shares(complexities, even.sharing, least=least, most=most)
        for places in [*shares, *([] for _ in range(parts - even.sharing))]:
            own = [complexities[place] for place in places]
            own_batches = even.own_micro_batches(len(own))
            pieces = fair_shares(
                own,
                own_batches,
                least=min(2, len(own) // own_batches),
                most=self._settings.max_local_batch_size,
            )
            pieces += [[] for _ in range(micro_batches - own_batches)]
            split.append(
                [
                    Piece(
                        [indices[places[at]] for at in piece],
                        _total([weights[places[at]] for at in piece]) / total,
                    )
                    for piece in pieces
                ]
            )
        return split


def _total(values: list[float]) -> float:
    total = 0.0
    for value in values:
        total += value
    return total
