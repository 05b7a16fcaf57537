"""Measures how long the sum of each bucket takes on the network, in a few backwards of each generation and then again.

Sums that run at the same time share the network, and any of them may end first: they share the time from the launch of
the first to the end of the last, by their bytes. Of several backwards the one with the shortest time of all sums counts
as a whole, for a worker that is early waits for the others. Only plain sums of the whole world are measured, whose
bytes on the network follow from the size of the bucket, and only transports that call back at the end of an operation:
NCCL's run on a device, and nothing is known of them here.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from bagua_core.communication.communicator import Pending
from bagua_core.communication.pending import WakeablePending

SKIPPED = 2  # backwards of a generation: first ones may allocate, compile, or be a joiner's
WATCHED = 4  # backwards after them
PAUSE = 20  # backwards between two measurements of a generation: a network may change meanwhile
MOST_BUCKETS = 256  # of more nothing is measured: their sizes are in a record of the job


@dataclass(slots=True)
class _Sum:
    size_bytes: int
    launched_s: float
    ended_s: float = field(default=0.0)

    def ended(self, _: object) -> None:
        """Records the end of the sum. Any thread may call it."""
        self.ended_s = time.monotonic()


class BucketTimes:
    def __init__(self) -> None:
        self.found: tuple[tuple[int, float], ...] = ()
        """Bytes and seconds of each bucket, in the order of their launch; empty: not known yet."""
        self._best: list[tuple[int, float]] = []
        self.begin_generation()

    def begin_generation(self) -> None:
        self._backwards = 0
        self._best = []
        self._sums: list[_Sum] = []

    @property
    def is_watching(self) -> bool:
        return SKIPPED < self._backwards <= SKIPPED + WATCHED

    def backward_begins(self) -> None:
        if self._backwards <= SKIPPED + WATCHED:
            self._take()
        self._backwards += 1
        if self._backwards > SKIPPED + WATCHED + PAUSE:
            self._backwards, self._best = SKIPPED + 1, []

    def launched(self, pending: Pending, size_bytes: int, *, is_plain: bool = True) -> None:
        """Watches an operation; operations come in the order of their launch. is_plain: a sum of the whole world, and
        nothing else."""
        if not self.is_watching or not is_plain or len(self._sums) > MOST_BUCKETS:
            return
        if isinstance(pending, WakeablePending):
            one = _Sum(size_bytes, time.monotonic())
            self._sums.append(one)
            pending._call_when_done(one.ended)

    def _take(self) -> None:
        """Takes the times of the backward before. A backward that was given up, or had too many buckets, is ignored."""
        sums, self._sums = self._sums, []
        if not sums or len(sums) > MOST_BUCKETS or any(not one.ended_s for one in sums):
            return
        self._best = _shorter(self._best, _service(sums))
        if self._backwards == SKIPPED + WATCHED:
            self.found = tuple(self._best)


def _service(sums: Sequence[_Sum]) -> list[tuple[int, float]]:
    """Returns bytes and seconds of each sum, in the order of launch."""
    found: list[tuple[int, float]] = []
    together: list[_Sum] = []
    for one in sums:
        if together and one.launched_s >= max(other.ended_s for other in together):
            found += _shared(together)
            together = []
        together.append(one)
    return found + _shared(together)


def _shared(together: Sequence[_Sum]) -> list[tuple[int, float]]:
    took_s = max(one.ended_s for one in together) - together[0].launched_s
    whole = sum(one.size_bytes for one in together)
    return [(one.size_bytes, took_s * one.size_bytes / whole if whole else 0.0) for one in together]


def _shorter(before: list[tuple[int, float]], now: list[tuple[int, float]]) -> list[tuple[int, float]]:
    """Returns the times whose sum is smaller; `now` if the times before are of other buckets."""
    if [size for size, _ in before] != [size for size, _ in now]:
        return now
    return min(before, now, key=lambda of: sum(took_s for _, took_s in of))
