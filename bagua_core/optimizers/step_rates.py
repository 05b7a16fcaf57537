"""Checks that learning rates stay as they are between two parts of a step: micro-batches, or a worker's virtual shards.

The loop body runs once for each part, and the number of parts follows from the number of workers. A scheduler that is
not the job's would step once a part.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from bagua_core.communication.step_interface import MicroBatch, StepPlan
from bagua_core.errors import UserError


class RateChangedWithinStep(UserError, RuntimeError):
    """A learning rate changed between two parts of a step."""


class StepRates:
    """The learning rates with which the step under way began."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._optimizers = optimizers
        # None: no part of a step is known
        self._began: tuple[StepPlan, MicroBatch, list[float]] | None = None

    def check(self, plan: StepPlan, micro_batch: MicroBatch) -> None:
        """Checks the learning rates as a forward in `micro_batch` begins. Raises RateChangedWithinStep."""
        began = self._began
        if began is not None and began[1] is micro_batch:
            return
        if began is not None and (began[0] != plan or began[1].last):
            began = self._began = None
        if began is None and micro_batch.last:  # the whole step
            return
        rates = [float(group["lr"]) for o in self._optimizers for group in o.param_groups if "lr" in group]
        if began is not None and rates != began[2]:
            raise RateChangedWithinStep(
                f"the learning rate changed from {began[2]} to {rates} within step {plan.step}, whose loop body runs "
                "several times (max_local_batch_size, or the shards of a deterministic job); what a loop does once a "
                "step it must not do each time: pass the scheduler to bagua.register_state(), or set the rate if "
                "loader.is_at_step_end"
            )
        self._began = plan, micro_batch, rates
