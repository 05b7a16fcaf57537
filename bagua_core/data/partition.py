"""Splits an epoch into global batches, the ranks' shares of them, and micro-batches.

Owns that arithmetic and nothing else: no engine, no loader, no state. All ranks compute it for
themselves, so the same arguments give the same answer on every machine.
Invariants: shares of a batch are disjoint and cover it. Those that are not empty differ by at most one sample; in a
full batch all do. The number of micro-batches is the same on every rank.
"""

from __future__ import annotations

import functools

import torch

_MASK_64 = (1 << 64) - 1


def mixed_seed(*parts: int) -> int:
    """Returns 64 bits that follow from `parts` in this order (splitmix64), so that near seeds are unrelated."""
    state = 0
    for part in parts:
        state = (state + (part & _MASK_64) + 0x9E3779B97F4A7C15) & _MASK_64
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK_64
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK_64
        state ^= state >> 31
    return state


def epoch_order(seed: int, epoch: int, length: int, shuffle: bool) -> torch.LongTensor:
    """Returns the data set's indices in the order in which the job uses them in `epoch`. [length], int64."""
    if not shuffle:
        order = torch.arange(length, dtype=torch.int64, device="cpu")
    else:
        generator = torch.Generator(device="cpu").manual_seed(mixed_seed(seed, epoch))
        order = torch.randperm(length, generator=generator, device="cpu")
    assert isinstance(order, torch.LongTensor)
    return order


def batch_count(length: int, global_batch_size: int, drop_last: bool) -> int:
    """Returns the number of global batches per epoch; the last one is short unless it is dropped."""
    return length // global_batch_size if drop_last else -(-length // global_batch_size)


def global_batch(order: torch.Tensor, batch: int, global_batch_size: int) -> torch.Tensor:
    """Returns the data set's indices in global batch number `batch`; a view of `order`."""
    begin = batch * global_batch_size
    return order[begin : begin + global_batch_size]


def share(count: int, parts: int, part: int) -> range:
    """Returns the places of 0..count-1 that part `part` of `parts` takes; the first parts are one longer if need be."""
    least, longer = divmod(count, parts)
    start = part * least + min(part, longer)
    return range(start, start + least + (part < longer))


def micro_batch_count(count: int, parts: int, max_local_batch_size: int | None) -> int:
    """Returns the number of micro-batches of a step, by the largest share, so that every rank runs the same number."""
    if max_local_batch_size is None:
        return 1
    largest_share = -(-count // parts)
    return max(1, -(-largest_share // max_local_batch_size))


def micro_share(count: int, parts: int, part: int, micro_batches: int, micro: int) -> range:
    """Returns the places within the global batch of micro-batch `micro` of part `part`.

    Some are empty where a share is smaller than the number of micro-batches.
    """
    whole = share(count, parts, part)
    piece = share(len(whole), micro_batches, micro)
    return range(whole.start + piece.start, whole.start + piece.stop)


@functools.lru_cache(maxsize=64)  # nearly all batches of a job have the same numbers
def batch_split(count: int, parts: int, full_count: int, max_local_batch_size: int | None) -> BatchSplit:
    """Returns the BatchSplit of these arguments."""
    return BatchSplit(count, parts, full_count, max_local_batch_size)


class BatchSplit:
    """A batch of `count` samples, divided among `parts` workers. full_count: of a batch that is not an epoch's last.

    Batch normalization cannot train on one sample. A short batch avoids shares and micro-batches of one where full
    batches have none, so its last parts may be empty; its largest share is at most that of a full batch.
    """

    def __init__(self, count: int, parts: int, full_count: int, max_local_batch_size: int | None) -> None:
        self._count = count
        self._most_local = max_local_batch_size
        self._places: dict[tuple[int, int], range] = {}  # of those that were asked for
        self.is_short = count < full_count and full_count >= 2 * parts and max_local_batch_size != 1
        self.sharing = parts
        """Parts among which the samples are divided evenly; those behind have none."""
        if self.is_short and 1 < count < 2 * parts:
            fewer = count // 2
            if -(-count // fewer) <= -(-full_count // parts):
                self.sharing = fewer
        self.micro_batches = micro_batch_count(count, self.sharing, max_local_batch_size)

    def own_micro_batches(self, share_count: int) -> int:
        """Returns how many micro-batches a share of so many samples fills; the others of the step are empty."""
        return micro_batch_count(share_count, 1, self._most_local) if self.is_short else self.micro_batches

    def places(self, part: int, micro: int) -> range:
        """Returns the places within the batch of a micro-batch; empty for a part or micro-batch without samples."""
        found = self._places.get((part, micro))
        if found is None:
            found = self._places[part, micro] = self._places_of(part, micro)
        return found

    def _places_of(self, part: int, micro: int) -> range:
        if part >= self.sharing:
            return range(0)
        own = self.own_micro_batches(len(share(self._count, self.sharing, part)))
        return micro_share(self._count, self.sharing, part, own, micro) if micro < own else range(0)
