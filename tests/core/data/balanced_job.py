"""A job in one process whose loaders balance: fake_job.py's, whose shares need not be of equal size."""

from __future__ import annotations

from bagua_core.communication.step_interface import MicroBatch
from tests.core.data.fake_job import FakeEngine, Job


class BalancedEngine(FakeEngine):
    def __init__(self) -> None:
        super().__init__()
        self.weights: list[float] = []

    def begin_micro_batch(self, micro_batch: MicroBatch) -> None:
        self.weights.append(micro_batch.weight)
        super().begin_micro_batch(micro_batch)


class BalancedJob(Job):
    def _check_sizes(self, sizes: list[int]) -> None:
        """Shares follow from complexities."""
