"""Selects the steps of a run that count, and its end. All workers agree on both without a message.

Rank 0 decides before it trains a step, and leaves its decision in a file that the workers of a lab share. No step of
a measured system is complete without rank 0's part of it, so a worker that reaches the next step finds the file.
Workers that train alone have windows of their own (`Meeting`).

A window of a system that communicates in rounds contains whole rounds (`Enough.cycle`). If it did not, the throughput
would be that of another ratio of local steps to exchanges: 199 steps with one exchange of every 100 would show half of
its cost, and 101 steps with two nearly twice. `check_whole_rounds` ends such a run as a failure.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Enough:
    """When a measurement may end. warm_up: steps before it that do not count. cycle: count a multiple of so many.

    rounds: of background averaging that must have come in meanwhile. most_s: end it then at the latest, once there
    are two steps, whatever is missing.
    """

    warm_up: int
    steps: int
    window_s: float
    most_s: float
    cycle: int = 1
    rounds: int = 0

    def last(self, step: int, elapsed_s: float, rounds: int) -> int | None:
        """The step before which all stop, decided before step number `step`; None: go on for now.

        elapsed_s, rounds: since the end of the warm-up.
        """
        counted = step - self.warm_up
        is_enough = counted >= self.steps and elapsed_s >= self.window_s and rounds >= self.rounds
        if not is_enough and not (counted >= 2 and elapsed_s >= self.most_s):
            return None
        # one step ahead at least, or peers that are before this step already would not know
        return step + 1 + -(counted + 1) % self.cycle


class WindowError(ValueError):
    """A window does not contain whole rounds."""


def check_whole_rounds(system: str, steps: float, cycle: int) -> None:
    """steps: of a window, in global batches; cycle: those of its rounds. Raises WindowError."""
    if steps < 1 or steps % cycle:
        raise WindowError(
            f"the window of {system} has {steps:g} steps, not a multiple of {cycle}: it ends within a round, so its "
            "share of exchanges is not that of the training"
        )


class Meeting:
    """Workers of a lab that train alone meet at a stage, by a file of each in the directory that they share."""

    def __init__(self, directory: Path, stage: str, workers: int) -> None:
        self._files = [directory / f"{rank}.{stage}" for rank in range(workers)]

    def arrive(self, rank: int) -> None:
        self._files[rank].touch()

    @property
    def is_complete(self) -> bool:
        return all(file.exists() for file in self._files)


class Window:
    """Call `goes_on` before every step and `trained` after it."""

    def __init__(
        self,
        enough: Enough,
        decision: Path,
        decides: bool,
        rounds: Callable[[], int | None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._enough = enough
        self._decision = decision
        self._decides = decides
        self._rounds = rounds
        self._clock = clock
        self._step = -1
        self._stop: int | None = None
        self._rounds_before = 0
        self.began_s: list[
            float
        ] = []  # of every step, the warm-up's too, and of the one that was not done any more
        self.losses: list[float] = []

    def goes_on(self) -> bool:
        now_s = self._clock()
        self.began_s.append(now_s)
        self._step += 1
        warm_up = self._enough.warm_up
        if self._step == warm_up:
            self._rounds_before = self._rounds() or 0
        if self._stop is None and self._decides and self._step > warm_up:
            self._decide(now_s - self.began_s[warm_up])
        elif self._stop is None and not self._decides and self._decision.exists():
            self._stop = int(self._decision.read_text())
        return self._step != self._stop

    def trained(self, loss: float) -> None:
        self.losses.append(loss)

    @property
    def is_counting(self) -> bool:
        """Whether the step that begins is the first that counts."""
        return self._step == self._enough.warm_up

    @property
    def rounds(self) -> int | None:
        """That came in since the warm-up."""
        now = self._rounds()
        return None if now is None else now - self._rounds_before

    @property
    def step_s(self) -> list[float]:
        """Of the steps that count."""
        return durations(self.began_s[self._enough.warm_up :])

    def _decide(self, elapsed_s: float) -> None:
        self._stop = self._enough.last(self._step, elapsed_s, self.rounds or 0)
        if self._stop is not None:
            half = self._decision.with_suffix(".half")
            half.write_text(str(self._stop))
            half.rename(self._decision)


def durations(moments_s: Sequence[float]) -> list[float]:
    """From each moment to the next one."""
    return [after - before for before, after in itertools.pairwise(moments_s)]
