"""Writes and reads the numbers that ride behind the gradients in a step's last reduction.

They are summed as they are, neither weighted nor averaged: the switch pair (elastic/membership/switch_pair.py), the
count of optimizer steps (step_counts.py), the place of this reduction in the job (reduction_place.py), whether this
rank trains other parameters than before (trained_parameters.py), the loss that the script reports (reported_loss.py),
and a number by which an operation that does not sum the tail shows.
"""

from __future__ import annotations

from array import array
from typing import NamedTuple

import torch

from bagua_core.communication.communicator import Communicator
from bagua_core.communication.reduction import reduction_place, step_counts
from bagua_core.communication.reduction.bucket_buffer import TAIL_ELEMENTS
from bagua_core.communication.reduction.bucket_operation import BucketOperation
from bagua_core.communication.reduction.reduction_place import BackwardsDiffer
from bagua_core.communication.reduction.step_counts import OptimizerStepsDiffer
from bagua_core.communication.reduction.trained_parameters import TrainedParameters
from bagua_core.communication.step_interface import StepReductions
from bagua_core.errors import UserError
from bagua_core.model.optimizer_steps import optimizer_steps_of


def probe_of(global_rank: int) -> float:
    """Returns what a rank adds to the probe. The number has twelve bits, which half precision loses. It is not alike on
    all ranks, so that no multiple of a rank's own number is the sum. The sum is exact in fp32 for 4,096 ranks."""
    return float(4095 - global_rank % 2)


def probe_sum(world_size: int) -> float:
    return float(4095 * world_size - world_size // 2)


class PairNotCarried(UserError, TypeError):
    """A bucket operation that sets carries_pair does not sum what lies behind the gradients."""


class TailSums(NamedTuple):
    """The sums of the tail. pair: of the switch values. choices_differ: some rank trains other parameters than all last
    agreed on."""

    pair: tuple[float, float]
    choices_differ: bool


class StepTail:
    def __init__(self, engine: StepReductions, trained: TrainedParameters) -> None:
        self._engine = engine
        self._trained = trained
        self._optimizer_steps = optimizer_steps_of(engine)
        # generation and step of the newest reduction that is complete
        self._read_in: tuple[int, int] | None = None
        self._read = 0  # reductions that are complete in it
        self._row = array("f", bytes(TAIL_ELEMENTS * 4))  # the squares of counts need the 24 bits of fp32
        self._row_tensor = torch.frombuffer(self._row, dtype=torch.float32)  # the same memory

    def write(self, tail: torch.Tensor) -> None:
        """Writes this rank's numbers into `tail`, just before their reduction starts."""
        plan, v = self._engine.plan, self._engine.switch_value()
        count = self._optimizer_steps.before(plan.step)
        counts = step_counts.contribution(count)
        place = reduction_place.contribution(self._place())
        differs, probe = float(self._trained.differs), probe_of(plan.global_rank)
        losses = self._engine.loss_numbers()
        self._row[:] = array("f", (v, v * v, *counts, *place, differs, *losses, probe))
        tail.copy_(self._row_tensor)

    def read(
        self, tail: torch.Tensor, communicator: Communicator, carrier: BucketOperation | None = None
    ) -> TailSums:
        """Reads the sums from `tail`, which was reduced by `carrier` or in a message of its own. Raises BackwardsDiffer
        and OptimizerStepsDiffer on all ranks alike, PairNotCarried, CollectiveFailed."""
        numbers: list[float] = tail.tolist()
        total, squares, c0, c1, c2, p0, p1, p2, differing, losses, reporting, probe = numbers
        counts, places = (c0, c1, c2), (p0, p1, p2)
        expected = probe_sum(communicator.world_size)
        if carrier is not None and probe != expected:
            raise PairNotCarried(_not_carried(type(carrier), probe, expected))
        if step_counts.differ(places):
            raise BackwardsDiffer(self._explanation_of_places(communicator))
        if step_counts.differ(counts):
            raise OptimizerStepsDiffer(self._explanation(communicator))
        self._engine.losses_reduced((losses, reporting))
        self._count_reduction()
        return TailSums((total, squares), bool(differing))

    def _count_reduction(self) -> None:
        plan = self._engine.plan
        read_in = (plan.generation, plan.step)
        self._read = self._read + 1 if read_in == self._read_in else 1
        self._read_in = read_in

    def _place(self) -> tuple[int, int] | None:
        """Returns the place of this rank's next reduction, or of the one under way: committed steps, and reductions
        that are complete since. None beside a copy of the state."""
        plan = self._engine.plan
        if plan.global_rank in plan.healing:
            return None
        return plan.step, self._read if self._read_in == (plan.generation, plan.step) else 0

    def _explanation_of_places(self, communicator: Communicator) -> str:
        own = torch.tensor(self._place() or reduction_place.NO_PLACE, dtype=torch.int64, device="cpu")
        places = torch.empty(communicator.world_size, 2, dtype=own.dtype, device="cpu")
        self._engine.wait(communicator.allgather(places, own))
        return reduction_place.explain([(step, number) for step, number in places.tolist()])

    def _explanation(self, communicator: Communicator) -> str:
        step = self._engine.plan.step
        count = self._optimizer_steps.before(step)
        own = torch.tensor(
            [step_counts.NOT_COUNTED if count is None else count], dtype=torch.int64, device="cpu"
        )
        counts = torch.empty(communicator.world_size, 1, dtype=own.dtype, device="cpu")
        self._engine.wait(communicator.allgather(counts, own))
        return step_counts.explain(counts.flatten().tolist(), step)


def _not_carried(kind: type[BucketOperation], found: float, expected: float) -> str:
    return (
        f"{kind.__module__}.{kind.__qualname__} sets carries_pair = True, but its launch does not sum the whole bucket "
        f"exactly over all ranks: a number behind the gradients came back as {found:g} instead of {expected:g}. "
        "Leave carries_pair False; the switch pair then travels in a message of its own"
    )
