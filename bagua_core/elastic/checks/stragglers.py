"""Finds stragglers: ranks that make the others wait in every step. Pure arithmetic over durations; no clock.

A rank's *computing* time is its step's time minus what it waited in collectives: in a synchronous job all steps last
equally long, and only this differs. Every rank learns all ranks' means in the exchange that is made every so many
steps anyhow, and all come to the same conclusion. Reporting is the caller's. Invariants: a rank is named
once until it has recovered, and never for one slow window alone (a checkpoint, an evaluation, a page cache).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

SLOWER_BY = 1.5
WINDOWS = 3  # in a row, of digest_every_steps steps each
# A smaller difference has no cost: scheduling noise is larger.
LEAST_GAP_S = 0.002
MICROSECONDS = 1_000_000
UNKNOWN = -1  # as exchanged: no whole step in the window, as on a joiner


def shard_share(own: int, shards: int, workers: int) -> float | None:
    """Returns the shards of a worker over an equal part of them: with 8 shards a worker of three that owns 3 computes
    longer than one that owns 2, and is no slower. None where there are no shards."""
    return own * workers / shards if shards else None


class ComputingTime:
    """Measures the mean computing time of this rank since the last `take`, in seconds."""

    def __init__(self) -> None:
        self._computed_s = 0.0
        self._steps = 0

    def step_done(self, lasted_s: float, waited_s: float, shard_share: float | None = None) -> None:
        """Counts a committed step, as long as an equal part of its shards would have taken.

        waited_s: in its collectives; what is no step's time (healing, entering, evaluation between two steps) is in
        neither. shard_share: see shard_share(); a step without any shard says nothing of this rank's speed.
        """
        if shard_share == 0.0:
            return
        self._computed_s += max(0.0, lasted_s - waited_s) / (shard_share or 1.0)
        self._steps += 1

    def forget(self) -> None:
        """Begins anew, because the generation changed: shares of the batch did too."""
        self._computed_s, self._steps = 0.0, 0

    def take(self) -> int:
        """Returns the mean as it is exchanged, in microseconds (UNKNOWN without a step), and begins anew."""
        mean_us = UNKNOWN if not self._steps else round(self._computed_s / self._steps * MICROSECONDS)
        self.forget()
        return mean_us


@dataclass(frozen=True, slots=True)
class Straggler:
    """A rank that is slower than the others. others_s: median of the others' computing time."""

    global_rank: int
    computing_s: float
    others_s: float

    @property
    def slower_by(self) -> float:
        return self.computing_s / self.others_s if self.others_s else float("inf")

    def __str__(self) -> str:
        return (
            f"global rank {self.global_rank} is the slowest: it computes {self.computing_s:.3g} s a step, the others "
            f"{self.others_s:.3g} s ({self.slower_by:.1f} times), and they wait for it"
        )


def slow_ranks(
    computing_us: Sequence[int], slower_by: float = SLOWER_BY, least_gap_s: float = LEAST_GAP_S
) -> tuple[Straggler, ...]:
    """Returns the ranks slower than the others in one window, the slowest first. computing_us: by global rank.

    A rank is compared with the median of the *others*: of two ranks the slow one would else be half of what it is
    compared with.
    """
    known = {r: us / MICROSECONDS for r, us in enumerate(computing_us) if us != UNKNOWN}
    if len(known) < 2:
        return ()
    found = []
    for global_rank, own_s in known.items():
        others_s = median(s for r, s in known.items() if r != global_rank)
        if own_s >= slower_by * others_s and own_s - others_s >= least_gap_s:
            found.append(Straggler(global_rank, own_s, others_s))
    return tuple(sorted(found, key=lambda s: (-s.computing_s, s.global_rank)))


@dataclass(frozen=True, slots=True)
class Findings:
    """A window's findings. named: slow for long enough, reported now. recovered: global ranks named before that kept
    pace again for as long."""

    named: tuple[Straggler, ...] = ()
    recovered: tuple[int, ...] = ()


class StragglerWatch:
    """Finds workers that are slow for `windows` windows in a row, and those that no longer are.

    Counts by worker, so a change of the members or of their ranks begins nothing anew. A worker's counts end with its
    membership.
    """

    def __init__(self, slower_by: float = SLOWER_BY, windows: int = WINDOWS) -> None:
        if slower_by <= 1.0 or windows < 1:
            raise ValueError(
                f"a straggler is slower (more than 1.0 times) in at least 1 window, not {slower_by} and {windows}"
            )
        self._slower_by = slower_by
        self._windows = windows
        self._slow_for: dict[str, int] = {}
        self._fast_for: dict[str, int] = {}  # of those named

    def observe(self, workers: Sequence[str], computing_us: Sequence[int]) -> Findings:
        """Takes in one window and returns its findings. workers, computing_us: the ranks' worker ids and what they
        exchanged, by global rank. A rank without a measurement is neither slow nor fast in this window."""
        self._slow_for = {w: self._slow_for.get(w, 0) for w in workers}
        self._fast_for = {w: count for w, count in self._fast_for.items() if w in self._slow_for}
        known = [r for r, us in enumerate(computing_us) if us != UNKNOWN]
        if len(known) < 2:
            return Findings()
        slow = {s.global_rank: s for s in slow_ranks(computing_us, self._slower_by)}
        named, recovered = [], []
        for global_rank in (*slow, *(r for r in known if r not in slow)):  # the slowest first
            worker, is_slow = workers[global_rank], global_rank in slow
            self._slow_for[worker] = self._slow_for[worker] + 1 if is_slow else 0
            if worker not in self._fast_for:
                if self._slow_for[worker] >= self._windows:
                    named.append(slow[global_rank])
                    self._fast_for[worker] = 0
                continue
            self._fast_for[worker] = 0 if is_slow else self._fast_for[worker] + 1
            if self._fast_for[worker] == self._windows:
                del self._fast_for[worker]
                recovered.append(global_rank)
        return Findings(tuple(named), tuple(recovered))
