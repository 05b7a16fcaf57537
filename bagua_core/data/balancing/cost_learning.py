"""Which cost curve is in force at a step, and when does a new one come in? Measured on each worker, agreed by all.

Rows (what a worker's step took) stay here; every EVERY_STEPS steps their sums are added over all workers inside a step,
and when that step is committed, everybody that has it draws the same conclusion. So a curve is part of the job's
state, as parameters are: a step that fails takes its sums back, whoever heals gets the curves with the rest.
Invariants: curves follow from committed steps alone; the curve of any step that the ledger still looks at is kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

import torch

from bagua_core.data.balancing.cost_curve import CostCurve, Sums, fitted

EVERY_STEPS = 16
# Of the largest part of the costs. A smaller change gains little, and batches loaded ahead are thrown away for it.
CHANGE_THAT_COUNTS = 0.05
_STILL_COUNTS = 0.9  # of what was measured before, from one agreement to the next
_OUTLIER = 4.0  # times what such a step usually takes: a pause, not the samples
_KEPT_CURVES = 64  # the ledger looks a few steps back, one more for each step in which somebody healed
_MOST_ROWS = 4 * EVERY_STEPS


class CostLearner:
    """One per loader. knots: the same on all workers."""

    def __init__(self, knots: tuple[float, ...]) -> None:
        self._knots = knots
        self._rows: list[tuple[list[float], float]] = []
        self._sent = 0
        self._totals = Sums.zero(knots)
        self._curves: list[tuple[int, CostCurve]] = []  # from which step on; ascending
        self._state: dict[str, torch.Tensor] | None = None

    def in_force(self, step: int) -> CostCurve | None:
        """step: as in its StepPlan. None: complexities are the costs."""
        for from_step, curve in reversed(self._curves):
            if from_step <= step:
                return curve
        return None

    # -- measuring

    @staticmethod
    def is_due(step: int) -> bool:
        return step % EVERY_STEPS == EVERY_STEPS - 1

    def measured(self, complexities: Sequence[float], seconds: float) -> None:
        """A step of this worker was committed."""
        if complexities and seconds > 0.0:
            self._rows = [*self._rows, (list(complexities), seconds)][-_MOST_ROWS:]

    def contribution(self, step: int) -> torch.Tensor:
        """Sums of this worker's rows, to be added over the workers in `step`. float64."""
        self._sent = len(self._rows)
        sums = Sums.zero(self._knots)
        for complexities, seconds in self._usual(self.in_force(step)):
            sums = sums.plus(Sums.of_row(complexities, seconds, self._knots))
        return torch.tensor(sums.values, dtype=torch.float64)

    def _usual(self, curve: CostCurve | None) -> list[tuple[list[float], float]]:
        expected_s = [curve.step_s(row) if curve else sum(row) for row, _ in self._rows]
        ratios = [row[1] / e if e else 0.0 for row, e in zip(self._rows, expected_s, strict=True)]
        bound = _OUTLIER * median(ratios) if ratios else 0.0
        return [row for row, ratio in zip(self._rows, ratios, strict=True) if ratio <= bound]

    def agreed(self, step: int, totals: torch.Tensor) -> None:
        """`step` is committed, and `totals` is what all workers' contributions added up to in it."""
        del self._rows[: self._sent]
        self._sent = 0
        self._totals = self._totals.plus(Sums(tuple(totals.tolist())), keeping=_STILL_COUNTS)
        curve = fitted(self._totals, self._knots)
        if curve is not None and curve.differs(self.in_force(step), CHANGE_THAT_COUNTS):
            self._curves = [*self._curves, (step + 1, curve)][-_KEPT_CURVES:]
        self._state = None

    # -- part of the job's state

    def state_dict(self) -> dict[str, Any]:
        """Two tensors: it is copied before every step."""
        if self._state is None:
            rows = [[float(s), c.per_step, c.per_sample, *c.slopes] for s, c in self._curves]
            self._state = {
                "totals": torch.tensor(self._totals.values, dtype=torch.float64),
                "curves": torch.tensor(rows, dtype=torch.float64).reshape(len(rows), len(self._knots) + 4),
            }
        return self._state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._totals = Sums(tuple(state_dict["totals"].tolist()))
        self._curves = [
            (int(row[0]), CostCurve(self._knots, row[1], row[2], tuple(row[3:])))
            for row in state_dict["curves"].tolist()
        ]
        self._state = None
