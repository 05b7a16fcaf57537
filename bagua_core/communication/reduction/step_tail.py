"""Writes and reads the numbers that ride behind the gradients in a step's last reduction.

They are summed as they are, neither weighted nor averaged: the switch pair (elastic/membership/switch_pair.py), the
count of optimizer steps (step_counts.py), and whether this rank trains other parameters than before
(trained_parameters.py).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from bagua_core.communication.communicator import Communicator
from bagua_core.communication.reduction import step_counts
from bagua_core.communication.reduction.step_counts import OptimizerStepsDiffer
from bagua_core.communication.reduction.trained_parameters import TrainedParameters
from bagua_core.communication.step_interface import StepEngine
from bagua_core.model.optimizer_steps import optimizer_steps_of


@dataclass(frozen=True, slots=True)
class TailSums:
    """pair: of the switch values. choices_differ: some rank trains other parameters than all last agreed on."""

    pair: tuple[float, float]
    choices_differ: bool


class StepTail:
    def __init__(self, engine: StepEngine, trained: TrainedParameters) -> None:
        self._engine = engine
        self._trained = trained
        self._optimizer_steps = optimizer_steps_of(engine)

    def write(self, tail: torch.Tensor) -> None:
        """This rank's numbers, just before their reduction starts."""
        v = self._engine.switch_value()
        count = self._optimizer_steps.before(self._engine.plan.step)
        tail.copy_(torch.tensor((v, v * v, *step_counts.contribution(count), float(self._trained.differs))))

    def read(self, tail: torch.Tensor, communicator: Communicator) -> TailSums:
        """tail: reduced. Raises OptimizerStepsDiffer on all ranks alike, CollectiveFailed."""
        total, squares, ranks, steps, steps_squared, differing = tail.tolist()
        if step_counts.differ((ranks, steps, steps_squared)):
            raise OptimizerStepsDiffer(self._explanation(communicator))
        return TailSums((total, squares), bool(differing))

    def _explanation(self, communicator: Communicator) -> str:
        step = self._engine.plan.step
        count = self._optimizer_steps.before(step)
        own = torch.tensor([step_counts.NOT_COUNTED if count is None else count])
        counts = torch.empty(communicator.world_size, 1, dtype=own.dtype)
        self._engine.wait(communicator.allgather(counts, own))
        return step_counts.explain(counts.flatten().tolist(), step)
