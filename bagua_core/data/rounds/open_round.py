"""The current round as the loader sees it: this worker's lease cut into local batches, and what was drawn of it.

Owns the book of leases (leases.py), which is a part of the job's state: it travels to joiners and into checkpoints as
a registered object. The engine says when a round is closed, with what every member used. Invariant: what is drawn
counts as used, whether the script trains on it or not.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from bagua_core.communication.step_interface import StepPlan, Used
from bagua_core.data.partition import share
from bagua_core.data.prefetch import BatchKey
from bagua_core.data.rounds.leases import RULES, LeaseBook, Range, count_of, first_of
from bagua_core.errors import InternalError

# A worker whose lease is less than this part of the mean ends no round for the others: a pause may have made it look
# slow, and the round would be over at once.
LEAST_PART = 0.5


class _Lease:
    """Holds ranges of an epoch, in local batches of at least `size` samples that differ by at most one.

    The rest of a division enlarges batches, for a small one of its own would weigh as much as the others: it is an
    optimizer's step, and batch normalization refuses one sample.
    """

    def __init__(self, epoch: int, ranges: tuple[Range, ...], size: int) -> None:
        self.epoch = epoch
        self.places = [place for start, stop in ranges for place in range(start, stop)]
        self.ranges = ranges
        self.size = size
        # what a batch consists of follows from these alone, so batches that were read ahead are found by them
        self.digest = zlib.crc32(repr((epoch, ranges, size)).encode())

    @property
    def batches(self) -> int:
        return max(1, len(self.places) // self.size) if self.places else 0

    def batch(self, number: int) -> list[int]:
        places = share(len(self.places), self.batches, number)
        return self.places[places.start : places.stop]


class Rounds:
    """The rounds of a job: the book of leases, and this worker's lease in the current round.

    steps: local steps of a round for a worker of average speed. order_of: an epoch's indices of the data set.
    """

    def __init__(
        self,
        length: int,
        steps: int,
        global_batch_size: int,
        order_of: Callable[[int], torch.Tensor],
    ) -> None:
        self.book = LeaseBook.of_epoch(length, 0)
        self._steps = steps
        self._size = global_batch_size
        self._order = order_of
        self._kept: dict[
            tuple[int, int], tuple[tuple[Range, ...], ...]
        ] = {}  # of closed rounds, by global rank
        self._lease = _Lease(0, (), 1)
        self._next = self._lease  # what the next round probably is
        self._used = 0
        self._began_s = self._ended_s = 0.0
        self._timed = 0  # samples used between these two
        self._mean_lease = 0.0
        self.may_end_early = False
        """See step_interface.Rounds."""

    # -- the round under way

    @property
    def has_work(self) -> bool:
        """Whether local steps were taken that no committed round contains."""
        return self._used > 0

    @property
    def is_used_up(self) -> bool:
        """Whether this worker has used its whole lease, which is large enough for the others to end the round by it."""
        used = self._used
        return used == len(self._lease.places) and used >= max(1.0, LEAST_PART * self._mean_lease)

    def open(self, plan: StepPlan) -> int:
        """Leases this worker's samples of the round that begins. Returns the number of local batches."""
        workers = _active(plan)
        leases = self._ranges(self.book, workers)
        self._lease = self._leased(self.book, workers, plan)
        self._mean_lease = sum(map(count_of, leases)) / len(leases)
        self.may_end_early = not self.book.is_last(self._most)
        in_full = self.book.closed(workers, [Used(ranges) for ranges in leases])
        self._next = self._leased(in_full, workers, plan)
        self._used = 0
        self._began_s = self._ended_s = 0.0
        self._timed = 0
        return self._lease.batches

    def samples_in(self, batch: int) -> int:
        """Returns the number of samples of local batch `batch` of the lease."""
        return len(self._lease.batch(batch))

    def draw(self, batch: int, now_s: float) -> None:
        """Notes that local batch `batch` is passed to the script, which is done with those before it."""
        if self._used == 0:
            self._began_s = now_s
        self._used += len(self._lease.batch(batch))

    def pause(self, now_s: float) -> None:
        """Notes that the script is done with the batches that it drew."""
        self._ended_s, self._timed = now_s, self._used

    def used(self) -> Used:
        ranges = first_of(self._lease.ranges, self._used)
        took_s = self._ended_s - self._began_s
        return Used(ranges, self._timed / took_s if self._timed and took_s > 0 else 0.0)

    def closed(self, plan: StepPlan, used: Sequence[Used]) -> None:
        """Closes the committed round in the book. used: by global rank of `plan`. Raises LeaseConflict."""
        self._kept[self.book.epoch, self.book.number] = tuple(one.ranges for one in used)
        self.book = self.book.closed(_workers(plan), used, self._most)
        self._used = 0

    def drop(self) -> None:
        """Forgets what was drawn of the lease; see step_interface.Rounds."""
        self._used = self._timed = 0

    def keep_only(self, positions: Iterable[Mapping[str, int]]) -> None:
        """Forgets the samples of all closed rounds but those at `positions`, which the ledger may still ask for."""
        asked = {(position["epoch"], position["batch"]) for position in positions}
        self._kept = {at: ranges for at, ranges in self._kept.items() if at in asked}

    def fingerprint(self) -> dict[str, str]:
        """Returns what must be equal on all workers, beside the loader's settings."""
        return {"rules_of_rounds": str(RULES)}

    @property
    def position(self) -> dict[str, int]:
        return {"epoch": self.book.epoch, "batch": self.book.number}

    @property
    def committed_samples(self) -> int:
        """The number of places that closed rounds have used, over all epochs."""
        book = self.book
        return (book.epoch + 1) * book.length - count_of(book.unused)

    def sample_count(self, position: Mapping[str, int]) -> int:
        """Returns the samples that all ranks used in a closed round.

        Raises InternalError for a round that is not kept any more.
        """
        return sum(count_of(ranges) for ranges in self._ranges_in(position))

    def samples_of(self, position: Mapping[str, int], global_rank: int) -> list[int]:
        """Returns the indices that a rank used in a closed round.

        Raises InternalError for a round that is not kept any more.
        """
        kept = self._ranges_in(position)
        order = self._order(position["epoch"])
        return [index for start, stop in kept[global_rank] for index in order[start:stop].tolist()]

    def _ranges_in(self, position: Mapping[str, int]) -> tuple[tuple[Range, ...], ...]:
        kept = self._kept.get((position["epoch"], position["batch"]))
        if kept is None:
            raise InternalError(f"the leases of round {dict(position)} are not kept any more")
        return kept

    # -- for the prefetcher

    def key(self, batch: int) -> BatchKey:
        return BatchKey(self._lease.digest, 0, self._lease.epoch, 0, batch)

    def indices_of(self, key: BatchKey) -> list[int]:
        """Returns the indices to load for `key`; two samples of the epoch for a key that no lease has."""
        order = self._order(key.epoch)
        for lease in (self._lease, self._next):
            if lease.digest == key.active_index and key.micro < lease.batches:
                return [int(order[place]) for place in lease.batch(key.micro)]
        return order[:2].tolist()

    def following(self, key: BatchKey) -> BatchKey:
        for lease in (self._lease, self._next):
            if lease.digest == key.active_index and key.micro + 1 < lease.batches:
                return key._replace(micro=key.micro + 1)
        return BatchKey(self._next.digest, 0, self._next.epoch, 0, 0)

    # -- the state of the job (a registered object)

    def state_dict(self) -> dict[str, Any]:
        book = self.book
        return {
            "length": book.length,
            "epoch": book.epoch,
            "number": book.number,
            "unused": [list(r) for r in book.unused],
            "speeds": dict(book.speeds),
            "stretch": book.stretch,
            "kept": [[*at, [[list(r) for r in of] for of in ranges]] for at, ranges in self._kept.items()],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes over another worker's book. What this worker drew since belongs to no round of it.

        Raises ValueError for the book of another data set.
        """
        if state["length"] != self.book.length:
            raise ValueError(
                f"the leases of {state['length']} samples do not fit an epoch of {self.book.length}: "
                "the data set, its batch size or drop_last has changed"
            )
        unused = tuple((int(a), int(b)) for a, b in state["unused"])
        self.book = LeaseBook(
            state["length"],
            state["epoch"],
            state["number"],
            unused,
            {k: float(v) for k, v in state["speeds"].items()},
            float(state.get("stretch", 1.0)),
        )
        self._kept = {
            (epoch, number): tuple(tuple((int(a), int(b)) for a, b in of) for of in ranges)
            for epoch, number, ranges in state["kept"]
        }
        self.drop()

    # --

    def _ranges(self, book: LeaseBook, workers: Sequence[str]) -> list[tuple[Range, ...]]:
        return book.lease(workers, self._most)

    @property
    def _most(self) -> int:
        """The samples of a round."""
        return self._steps * self._size

    def _leased(self, book: LeaseBook, workers: Sequence[str], plan: StepPlan) -> _Lease:
        place = plan.active_index
        ranges = () if place is None else self._ranges(book, workers)[place]
        return _Lease(book.epoch, ranges, max(1, self._size // max(1, len(workers))))


def _workers(plan: StepPlan) -> tuple[str, ...]:
    return plan.workers or tuple(str(rank) for rank in range(plan.world_size))


def _active(plan: StepPlan) -> tuple[str, ...]:
    return tuple(w for rank, w in enumerate(_workers(plan)) if rank not in plan.healing)
