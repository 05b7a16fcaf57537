"""Computes the job's mean loss from two numbers that each rank adds to a step's last reduction.

What a script reports behind a step travels with the next one, so the mean costs no message of its own and lags by one
step. Ranks that report nothing do not count. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

LOSS = "loss"  # the name under which a script reports it
NOT_REPORTED = (0.0, 0.0)


@dataclass(frozen=True, slots=True)
class JobLoss:
    """The job's mean loss. mean: over the ranks that report a loss, `reporting` of them."""

    mean: float
    reporting: int


def contribution(metrics: Mapping[str, float]) -> tuple[float, float]:
    """Returns what a rank adds to the sums. metrics: its newest values by name."""
    return (metrics[LOSS], 1.0) if LOSS in metrics else NOT_REPORTED


def job_loss(sums: tuple[float, float]) -> JobLoss | None:
    """Returns the job's mean loss; None if no rank reports a loss. sums: of all ranks' contributions."""
    total, reporting = sums[0], round(sums[1])
    return JobLoss(total / reporting, reporting) if reporting > 0 else None
