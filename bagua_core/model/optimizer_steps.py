"""Counts the optimizer steps of each step of the job, so that ranks can compare them.

One count per engine. The gates on optimizers count, the wrapped models say when a step is committed or rolled back, and
the reducers ask for the count of the step before. A count is valid only in the step right after its own: a rank that
copied a state in between has no count for it. The gates also note each call within a micro-batch, for reducers that
see a second backward in it (earlier_backwards.py).
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch

_of_engine: weakref.WeakKeyDictionary[object, OptimizerSteps] = weakref.WeakKeyDictionary()


class OptimizerSteps:
    def __init__(self) -> None:
        self._count = 0  # in the step under way
        # steps committed by then, and the count of the last of them
        self._committed: tuple[int, int] | None = None
        self._compared = True
        self._micro_batch: object = None  # in which the calls were made
        self._calls: list[torch.optim.Optimizer] = []

    def called(self, optimizer: torch.optim.Optimizer, micro_batch: object) -> None:
        """Notes that the script called optimizer.step() in `micro_batch`, whether that steps or not."""
        if micro_batch is not self._micro_batch:
            self._micro_batch, self._calls = micro_batch, []
        self._calls.append(optimizer)

    def calls_in(self, micro_batch: object) -> Sequence[torch.optim.Optimizer]:
        """Returns the optimizers that were called in `micro_batch`, the newest micro-batch, in order."""
        return self._calls if micro_batch is self._micro_batch else ()

    def stepped(self) -> None:
        """Counts a step of an optimizer that was due, whether this attempt takes it or an earlier one did."""
        self._count += 1

    def step_committed(self, step: int) -> None:
        """Keeps the count of the plan's `step`, which is committed. Every wrapped model calls this; the first call
        counts."""
        if self._committed is None or self._committed[0] != step + 1:
            self._committed = (step + 1, self._count)
        self._count = 0

    def step_rolled_back(self) -> None:
        self._count = 0

    def leave_uncompared(self) -> None:
        """Stops the comparison: replicas differ by design, so ranks may decide differently, for example after an
        overflow."""
        self._compared = False

    def before(self, step: int) -> int | None:
        """Returns the count of the step before `step`; None if this rank did not commit that one by itself."""
        if self._committed is None or self._committed[0] != step or not self._compared:
            return None
        return self._committed[1]


def optimizer_steps_of(engine: object) -> OptimizerSteps:
    """Returns the engine's count; there is one from the first call on."""
    found = _of_engine.get(engine)
    if found is None:
        found = _of_engine[engine] = OptimizerSteps()
    return found
