"""Leases samples to workers for a round, and keeps what of an epoch no committed round has used.

Owns that arithmetic: pure, no engine, no loader, no clock. A *place* is a position in the epoch's order; a range is a
half-open interval of places. Workers lease unused places in proportion to their speeds. What a worker did not use of
its lease, or took with it when it was lost, was never marked: it is leased again in a later round.
Invariants: the leases of a round are disjoint; a place becomes used in at most one committed round of its epoch; an
epoch ends when no place of it is unused. Rules: docs/design/rounds.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from bagua_core.communication.step_interface import MOST_LEASE_RANGES, Used
from bagua_core.errors import InternalError

# What a round says of a worker's speed counts for this part, for one round measures it to some percent only. A speed
# that is greater or less by SPEED_JUMP is taken as it is.
NEWEST_PART = 0.3
SPEED_JUMP = 1.5
# The least samples of a lease, for batch normalization cannot train on one.
MEASURED_BY = 2
# A round has up to this part more samples than it is to have: leases are longer where rounds end before they are used
# up, and the last round of an epoch leaves no rest for a small round of its own.
MOST_MORE = 0.25
# Of the rules by which leases follow from a book and the members: workers with other rules would use places twice.
# Rules of the averages count too: members send the same collectives.
RULES = 3

Range = tuple[int, int]


class LeaseConflict(InternalError, RuntimeError):
    """Two workers used the same places, or places that an earlier round has used."""


@dataclass(frozen=True, slots=True)
class LeaseBook:
    """Records the places of an epoch that are still to be used.

    length: places of every epoch; number: of the next round in
    the epoch; unused: ascending, disjoint, not touching; speeds: samples per second by worker id, means of some rounds;
    stretch: leases of a round over the samples that it is to have.
    """

    length: int
    epoch: int = 0
    number: int = 0
    unused: tuple[Range, ...] = ()
    speeds: Mapping[str, float] = field(default_factory=dict)
    stretch: float = 1.0

    @staticmethod
    def of_epoch(
        length: int, epoch: int, speeds: Mapping[str, float] | None = None, stretch: float = 1.0
    ) -> LeaseBook:
        return LeaseBook(length, epoch, 0, ((0, length),), speeds or {}, stretch)

    def lease(self, workers: Sequence[str], most: int) -> list[tuple[Range, ...]]:
        """Returns a lease for each worker, in their order.

        most: samples that the round is to have; leases may have MOST_MORE.

        A worker whose speed is not known counts as fast as the others' mean.
        """
        taken = self.unused if self.is_last(most) else _first(self.unused, int(most * self.stretch))
        known = [self.speeds[w] for w in workers if self.speeds.get(w, 0.0) > 0]
        assumed = sum(known) / len(known) if known else 1.0
        shares = _without_lone_samples(
            _with_least(proportional(count_of(taken), [self.speeds.get(w, 0.0) or assumed for w in workers]))
        )
        return _dealt(taken, shares)

    def is_last(self, most: int) -> bool:
        """Tells whether the leases of a round of `most` samples are all that the epoch has left."""
        return count_of(self.unused) <= most + int(most * MOST_MORE)

    def closed(self, workers: Sequence[str], used: Sequence[Used], most: int = 0) -> LeaseBook:
        """Returns the book after a round in which each of `workers` used these places.

        most: samples that the round was to have; 0: unknown. Raises LeaseConflict.
        """
        unused = self.unused
        for one in used:
            for each in one.ranges:
                unused = _without(unused, each)
        speeds = {w: _steady(self.speeds.get(w, 0.0), u.speed) for w, u in zip(workers, used, strict=True)}
        if not unused:
            return LeaseBook.of_epoch(self.length, self.epoch + 1, speeds, self.stretch)
        stretch = self._stretched(sum(one.count for one in used), most)
        return replace(self, number=self.number + 1, unused=unused, speeds=speeds, stretch=stretch)

    def _stretched(self, used: int, most: int) -> float:
        """Returns the stretch after a round that used so many samples. The first worker that is done ends a round, so
        more is leased than is used. A round of less than half its samples was ended by something else."""
        if not most or self.is_last(most) or 2 * used < most:
            return self.stretch
        # no power: leases must be the same on hosts whose mathematical libraries differ in the last bit
        stretch = self.stretch * (1.0 + NEWEST_PART * (most / used - 1.0))
        return min(max(stretch, 1.0), 1.0 + MOST_MORE)


def count_of(ranges: Sequence[Range]) -> int:
    return sum(stop - start for start, stop in ranges)


def proportional(total: int, weights: Sequence[float]) -> list[int]:
    """Splits `total` in proportion to `weights`, all positive; shares sum to it (largest remainders, then order)."""
    whole = sum(weights)
    exact = [total * weight / whole for weight in weights]
    shares = [int(e) for e in exact]
    by_remainder = sorted(range(len(weights)), key=lambda i: (shares[i] - exact[i], i))
    for i in by_remainder[: total - sum(shares)]:
        shares[i] += 1
    return shares


def _with_least(shares: Sequence[int]) -> list[int]:
    """Gives each worker at least one small batch, where there is enough: a speed that was low once, in a round with a
    pause, is measured again only by local steps."""
    if sum(shares) < MEASURED_BY * len(shares):
        return list(shares)
    kept = [max(MEASURED_BY, share) for share in shares]
    for _ in range(sum(kept) - sum(shares)):
        kept[max(range(len(kept)), key=kept.__getitem__)] -= 1
    return kept


def _without_lone_samples(shares: Sequence[int]) -> list[int]:
    """Moves each share of one sample to the largest share, for batch normalization cannot train on one sample."""
    largest = max(range(len(shares)), key=shares.__getitem__)
    kept = [0 if share == 1 and i != largest else share for i, share in enumerate(shares)]
    kept[largest] += sum(shares) - sum(kept)
    return kept


def first_of(ranges: Sequence[Range], count: int) -> tuple[Range, ...]:
    """Returns the first `count` places of `ranges`, or all of them."""
    return _first(ranges, count)


def _dealt(taken: Sequence[Range], shares: Sequence[int]) -> list[tuple[Range, ...]]:
    """Deals the ranges `taken` to the shares, in MOST_LEASE_RANGES ranges each at most.

    Workers that ended a round before their leases were used up have left small ranges. Each gets some of these in turn,
    and the rest of its share from the last range, which no round has had.
    """
    own: list[list[Range]] = [[] for _ in shares]
    left = list(shares)
    turn = 0
    for start, stop in taken[:-1]:
        for _ in shares:
            if start < stop and left[turn] and len(own[turn]) < MOST_LEASE_RANGES - 1:
                cut = min(stop, start + left[turn])
                own[turn].append((start, cut))
                left[turn] -= cut - start
                start = cut
            turn = (turn + 1) % len(shares)
            if start == stop:
                break
    rest = tuple(taken[-1:])
    if sum(left) > count_of(rest):  # some ranges found no place
        left = proportional(count_of(rest), left)
    for place, count in enumerate(left):
        more, rest = _split(rest, count)
        own[place] += more
    # such a lease is smaller than its share, and no lone sample
    return [
        () if count_of(ranges) == 1 < share else tuple(ranges)
        for ranges, share in zip(own, shares, strict=True)
    ]


def _first(ranges: Sequence[Range], count: int) -> tuple[Range, ...]:
    return _split(ranges, count)[0]


def _split(ranges: Sequence[Range], count: int) -> tuple[tuple[Range, ...], tuple[Range, ...]]:
    before: list[Range] = []
    behind: list[Range] = []
    for start, stop in ranges:
        cut = min(stop, start + count)
        count -= cut - start
        if cut > start:
            before.append((start, cut))
        if stop > cut:
            behind.append((cut, stop))
    return tuple(before), tuple(behind)


def _without(unused: tuple[Range, ...], used: Range) -> tuple[Range, ...]:
    start, stop = used
    for i, (low, high) in enumerate(unused):
        if low <= start < stop <= high:
            rest = tuple(r for r in ((low, start), (stop, high)) if r[0] < r[1])
            return (*unused[:i], *rest, *unused[i + 1 :])
    raise LeaseConflict(f"places {start} to {stop} were used, but of the epoch only {list(unused)} are left")


def _steady(before: float, now: float) -> float:
    """Returns a worker's speed after a round. A worker that took no step keeps its speed."""
    if now <= 0:
        return before
    is_jump = not before / SPEED_JUMP < now < before * SPEED_JUMP
    return now if is_jump else before + NEWEST_PART * (now - before)
