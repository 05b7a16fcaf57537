"""Divides epochs whose order a sampler gives: the sampler says which samples, and the split stays the job's.

Every worker draws the whole order by itself, under a seed that follows from (seed, epoch) and the sampler's state. The
order of an epoch is drawn when its first step begins, and holds to its end. Its checksum travels to workers that join:
they draw it again once they have the job's state, and raise SamplerError if theirs is another one.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch.utils.data import DistributedSampler

from bagua_core.communication.step_interface import Stateful
from bagua_core.data.division import KEPT_EPOCHS, Division, DivisionSettings, EvenDivision
from bagua_core.data.partition import batch_count, micro_batch_count, mixed_seed
from bagua_core.data.sample_seeding import random_sources_kept, seed_random_sources
from bagua_core.errors import UserError


class SamplerError(UserError, ValueError):
    """A sampler gives an order that the workers of a job cannot have in common, or no usable one."""


class _Begun(NamedTuple):
    """The epoch whose steps have begun. crc: of its order."""

    epoch: int
    crc: int


class SampledDivision(EvenDivision):
    """An EvenDivision in the order of `sampler`, which may leave samples out and name one several times."""

    orders_ahead = False  # the script may change the sampler between two epochs

    def __init__(self, sampler: Any, length: int, settings: DivisionSettings) -> None:
        """Takes a sampler of a data set of `length` samples. Raises SamplerError, TypeError if it can't be used."""
        _refuse(sampler)
        super().__init__(length, settings)
        self._sampler = sampler
        self._seed = settings.seed
        self._drop_last = settings.drop_last
        self._orders: dict[int, torch.LongTensor] = {}
        self._order = self._kept_order  # type: ignore[assignment]
        self._first_crc: int | None = None
        self._begun: _Begun | None = None

    def prepare(self) -> None:
        """Checks the sampler. Raises SamplerError for one whose own random numbers give epoch 0 two orders."""
        self.fingerprint()
        if not torch.equal(self._order(0), self._draw(0)):
            raise SamplerError(
                f"{_kind(self._sampler)} gave two orders for epoch 0. Workers must agree on it, so it must follow "
                "from torch's, NumPy's or Python's global generators, which are seeded here, or from set_epoch(epoch)"
            )

    def read(self, epoch: int, batch: int) -> None:
        """Draws the order of an epoch whose first step begins here: the one that was asked for before may be that of
        another state of the sampler."""
        if self._begun is None or self._begun.epoch != epoch:
            self._orders.pop(epoch, None)
            self._begun = None
            self._begun = _Begun(epoch, _crc(self._order(epoch)))
            if not self.has_batch(epoch, batch):
                raise SamplerError(
                    f"{_kind(self._sampler)} gave {len(self._order(epoch))} indices for epoch {epoch}, in which the "
                    f"job is at batch {batch}. What its length follows from must be part of the job's state: pass it "
                    "to bagua.register_state()"
                )

    def batch_count(self, epoch: int) -> int:
        return batch_count(len(self._order(epoch)), self._size, self._drop_last)

    def may_have_batch(self, epoch: int, batch: int) -> bool:
        # the sampler's state, from which the length of an epoch may follow, comes with that of the epoch
        has_begun = self._begun is not None and self._begun.epoch == epoch
        return not has_begun or self.has_batch(epoch, batch)

    def micro_batches(self, epoch: int, batch: int, parts: int, part: int | None = None) -> int:
        # of a full batch: a worker that joins does not know yet whether this one is short
        return micro_batch_count(self._size, parts, self._most_local)

    def known_steps(self, epochs: int) -> int:
        return 0  # a sampler may give another number of samples in each epoch

    def samples_before(self, epoch: int, batch: int) -> int:
        return Division.samples_before(self, epoch, batch)  # not known either

    def fingerprint(self) -> dict[str, str]:
        if self._first_crc is None:  # once: later the sampler may have another state
            self._first_crc = _crc(self._order(0))
        return {"sampler": _kind(self._sampler), "order_of_epoch_0": f"{self._first_crc:08x}"}

    def samples(self, epoch: int, batch: int) -> int:
        return min(self._size, len(self._order(epoch)) - batch * self._size)

    def _kept_order(self, epoch: int) -> torch.LongTensor:
        if epoch not in self._orders:
            order = self._checked_order(epoch)
            self._orders = dict([*self._orders.items(), (epoch, order)][-KEPT_EPOCHS:])
        return self._orders[epoch]

    def _checked_order(self, epoch: int) -> torch.LongTensor:
        order = self._draw(epoch)
        if self._begun is not None and self._begun.epoch == epoch and self._begun.crc != _crc(order):
            raise SamplerError(
                f"{_kind(self._sampler)} gives another order for epoch {epoch} than the job's workers have. What its "
                "order follows from must be the same on every worker: pass it to bagua.register_state(), and change "
                "it only between two epochs"
            )
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

    # -- the state that travels

    def travelling(self) -> Mapping[str, Stateful]:
        return {"bagua.sampler": self}

    def state_dict(self) -> dict[str, int]:
        return {} if self._begun is None else self._begun._asdict()

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Takes over the epoch that the job is in. Its order is drawn when it is needed: the sampler's own state may
        come after this one."""
        begun = _Begun(**state) if state else None
        if begun == self._begun:
            return
        self._begun = begun
        known = None if begun is None else self._orders.get(begun.epoch)
        self._orders.clear()
        if begun is not None and known is not None and _crc(known) == begun.crc:
            self._orders[begun.epoch] = known
        else:
            self.orders_change()


def _crc(order: torch.Tensor) -> int:
    return zlib.crc32(order.numpy().tobytes())


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
