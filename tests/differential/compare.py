"""Compares a job with the plain process, value by value, each within its tolerance.

Exactly equal: steps committed, counts, shapes, hyperparameters without rounding, the samples of every step (from the
ledger), and every bit of the final state between the workers of the job.

Equal within rounding: floating point values between job and plain process. The sums of several workers round
differently from one process's sum. In float64 that is 1e-16 of a value each step; models are smooth and small, so the
largest difference after all steps stays far below TOLERANCES, while one sample too few in one step moves parameters
by 1e-3. LBFGS divides by differences of gradients, which multiplies rounding: two workers without any fault were seen
to differ from the plain process by 5e-9. In bfloat16 the gradient of each share is rounded to 8 bits, so the scale is
measured for each seed: the difference between the plain process and two workers without any fault. What an optimizer
keeps as a scalar tensor (steps, products of betas) follows from the number of steps alone, so it is equal within
SCALAR_TOLERANCE.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from tests.differential.features import Features
from tests.lab import ledger

State = Mapping[str, Any]

# Largest difference from the plain process, relative to the largest value of the tensor or 1.
TOLERANCES = {"float64": 1e-9, "float32": 1e-4}
LBFGS_TOLERANCE = 1e-7
# How much more rounding a history may bring than two workers without faults.
BFLOAT16_FACTOR = 6.0
# NAdam divides by the gradient's size: its noise is lr in each step
BFLOAT16_LEAST = {
    "master": 0.02,
    "nadam": 0.2,
}
SCALAR_TOLERANCE = 1e-6


def against_plain(job: State, plain: State, tolerance: float) -> list[str]:
    """What differs, the largest first."""
    found = [
        f"{p} is only in {'the job' if p in job else 'the plain process'}" for p in job.keys() ^ plain.keys()
    ]
    measured = []
    for path in job.keys() & plain.keys():
        difference = _difference(job[path], plain[path])
        is_scalar = isinstance(plain[path], torch.Tensor) and not plain[path].dim()
        if difference > (min(tolerance, SCALAR_TOLERANCE) if is_scalar else tolerance):
            measured.append(
                (difference, f"{path} differs by {difference:.3g}{_shown(job[path], plain[path])}")
            )
    return found + [text for _, text in sorted(measured, key=lambda m: -m[0])]


def largest_difference(job: State, plain: State) -> float:
    """Of all floating point values; infinite if the states do not correspond."""
    if job.keys() != plain.keys():
        return math.inf
    return max(_difference(job[path], plain[path]) for path in job)


def without_running_statistics(state: State) -> dict[str, Any]:
    """For a history in which another worker becomes rank 0. Statistics of batch normalization are those of rank 0's
    shares; from then on they continue those of the other worker, with its share of the step before, and not those that
    the one process has. How often they were updated stays in."""
    return {path: v for path, v in state.items() if not path.endswith((".running_mean", ".running_var"))}


def between_workers(states: Mapping[str, State]) -> list[str]:
    """Where the final states of a job's workers differ in any bit."""
    names = sorted(states)
    first, found = states[names[0]], []
    for name in names[1:]:
        other = states[name]
        paths = sorted(p for p in first.keys() | other.keys() if not _same(first.get(p), other.get(p)))
        if paths:
            found.append(f"{names[0]} and {name} are not the same in {', '.join(paths[:6])}")
    return found


def ledger_against_plain(directory: Path, f: Features, samples: Mapping[int, list[int]]) -> list[str]:
    """The ledger's own checks, and each committed step's samples."""
    if f.loop == "next_step":
        return []  # the script draws, so the ledger knows no samples and has no lines
    read = ledger.read(directory)
    found = [] if read.steps == f.steps else [f"the ledger has {read.steps} steps instead of {f.steps}"]
    found += read.check(f.samples, f.epochs)
    used: dict[int, list[int]] = {}
    for line in read.lines:
        used.setdefault(line.step, []).extend(line.samples)
    for step, drawn in samples.items():
        if sorted(used.get(step + 1, [])) != sorted(drawn):
            found.append(f"step {step + 1} used {sorted(used.get(step + 1, []))} instead of {sorted(drawn)}")
    return found


def _difference(one: Any, other: Any) -> float:
    """0 for equal values; relative for floating point ones; infinite for others."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        if one.shape != other.shape or one.dtype != other.dtype:
            return math.inf
        if not one.is_floating_point():
            return 0.0 if torch.equal(one, other) else math.inf
        if one.numel() == 0:
            return 0.0
        a, b = one.double(), other.double()
        largest = float((a - b).abs().max())
        return largest / max(1.0, float(b.abs().max())) if math.isfinite(largest) else math.inf
    if isinstance(one, float) and isinstance(other, float):
        return abs(one - other) / max(1.0, abs(other)) if one != other else 0.0
    return 0.0 if type(one) is type(other) and one == other else math.inf


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    return type(one) is type(other) and bool(one == other)


def _shown(one: Any, other: Any) -> str:
    if isinstance(one, torch.Tensor) and one.numel() > 1:
        return ""
    return f": {one} instead of {other}"
