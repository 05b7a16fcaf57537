"""Divides epochs whose order a sampler gives: the sampler says which samples, and the split stays the job's.

Every worker draws the whole order by itself, under a seed that follows from (seed, epoch), so that nothing of it has to
travel and a worker that joins has the same one. A sampler whose order does not follow from that is refused.
"""

from __future__ import annotations

import functools
import zlib
from typing import Any

import torch
from torch.utils.data import DistributedSampler

from bagua_core.data.division import KEPT_EPOCHS, Division, DivisionSettings, EvenDivision
from bagua_core.data.partition import batch_count, mixed_seed
from bagua_core.data.sample_seeding import random_sources_kept, seed_random_sources
from bagua_core.errors import UserError


class SamplerError(UserError, ValueError):
    """A sampler gives an order that the workers of a job cannot have in common, or no usable one."""


class SampledDivision(EvenDivision):
    """An EvenDivision in the order of `sampler`, which may leave samples out and name one several times."""

    def __init__(self, sampler: Any, length: int, settings: DivisionSettings) -> None:
        """Takes a sampler of a data set of `length` samples. Raises SamplerError, TypeError if it can't be used."""
        _refuse(sampler)
        super().__init__(length, settings)
        self._sampler = sampler
        self._seed = settings.seed
        self._drop_last = settings.drop_last
        self._order = functools.lru_cache(KEPT_EPOCHS)(self._checked_order)

    def prepare(self) -> None:
        """Checks the sampler. Raises SamplerError for one whose own random numbers give epoch 0 two orders."""
        if not torch.equal(self._order(0), self._draw(0)):
            raise SamplerError(
                f"{_kind(self._sampler)} gave two orders for epoch 0. Workers must agree on it, so it must follow "
                "from torch's, NumPy's or Python's global generators, which are seeded here, or from set_epoch(epoch)"
            )

    def batch_count(self, epoch: int) -> int:
        return batch_count(len(self._order(epoch)), self._size, self._drop_last)

    def known_steps(self, epochs: int) -> int:
        return 0  # a sampler may give another number of samples in each epoch

    def samples_before(self, epoch: int, batch: int) -> int:
        return Division.samples_before(self, epoch, batch)  # not known either

    def fingerprint(self) -> dict[str, str]:
        return {
            "sampler": _kind(self._sampler),
            "order_of_epoch_0": f"{zlib.crc32(self._order(0).numpy().tobytes()):08x}",
        }

    def samples(self, epoch: int, batch: int) -> int:
        return min(self._size, len(self._order(epoch)) - batch * self._size)

    def _checked_order(self, epoch: int) -> torch.LongTensor:
        order = self._draw(epoch)
        least = self._size if self._drop_last else 1
        if len(order) < least:
            raise SamplerError(
                f"{_kind(self._sampler)} gave {len(order)} indices for epoch {epoch}, which make no batch of "
                f"global_batch_size={self._size}"
            )
        wrong = order[(order < 0) | (order >= self._length)]
        if len(wrong):
            raise SamplerError(
                f"{_kind(self._sampler)} gave index {int(wrong[0])} for a data set of {self._length} samples"
            )
        return order

    def _draw(self, epoch: int) -> torch.LongTensor:
        # on the CPU, whatever the script's default: of a GPU's generator the seed is not set, and workers would differ
        with random_sources_kept(), torch.device("cpu"):
            seed_random_sources(mixed_seed(self._seed, epoch))
            if hasattr(self._sampler, "set_epoch"):
                self._sampler.set_epoch(epoch)
            indices = list(self._sampler)
        try:
            order = torch.tensor([index.__index__() for index in indices], dtype=torch.int64, device="cpu")
        except (AttributeError, TypeError) as error:
            raise SamplerError(
                f"{_kind(self._sampler)} gave something else than integers ({error}); "
                "a sampler gives one index at a time"
            ) from error
        assert isinstance(order, torch.LongTensor)
        return order


def _refuse(sampler: Any) -> None:
    if isinstance(sampler, DistributedSampler):
        raise TypeError(
            "a DistributedSampler gives one worker's part, and the split follows the workers there are; leave it out, "
            "or pass the sampler of the whole order"
        )
    if not hasattr(sampler, "__iter__") or hasattr(sampler, "__next__"):
        raise TypeError(
            f"sampler={sampler!r} can't be iterated once for each epoch; pass an object with __iter__, such as a "
            "torch.utils.data.Sampler"
        )
    if getattr(sampler, "generator", None) is not None:
        raise SamplerError(
            f"{_kind(sampler)} has a generator of its own, whose state a worker that joins does not have; leave "
            "generator out: the order follows from the loader's seed and the epoch"
        )


def _kind(sampler: Any) -> str:
    return type(sampler).__name__
