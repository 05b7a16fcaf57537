"""Finds out by trying whether an optimizer works on each element by itself, so that parameters may share blocks.

Two optimizers like the script's take the same steps on small parameters, one as it is, one on blocks; parameters and
states must come out equal. What the trial cannot see: a rule that sets in only where none of its steps leads (see
trial_tensors.py), by the name of a parameter, or in an option that is not on yet; the latter is tried when it is
switched on.
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bagua_core.fused_optimizer import trial_tensors
from bagua_core.fused_optimizer.errors import FusedOptimizerError
from bagua_core.fused_optimizer.fused_step import FusedStep
from bagua_core.fused_optimizer.options import for_each_parameter
from bagua_core.fused_optimizer.state_layout import is_plain
from bagua_core.fused_optimizer.trial_instance import HoldsParameters, attributes_of, counts_of_steps, like


@dataclass(frozen=True, slots=True)
class TrialVerdict:
    """The result of a trial. reason: why the optimizer is not elementwise; empty if it is."""

    is_elementwise: bool
    reason: str = ""


_YES = TrialVerdict(True)
# Relative to an element, and to the largest one of its tensor. In float64 sums in another order differ by a millionth
# of it; in the others it is to tell one rule from another, not one rounding.
_TOLERANCE = {torch.float64: (1e-9, 1e-12), torch.float32: (1e-3, 1e-6)}
_COARSE = (0.1, 0.03)


def _schedule() -> list[tuple[int, int]]:
    """Returns (steps counted so far, how far to set the count ahead before this one) for each step of a trial."""
    schedule = [(taken, 0) for taken in range(trial_tensors.NATURAL_STEPS)]
    counted = trial_tensors.NATURAL_STEPS
    for jump in trial_tensors.JUMPS:
        for later in range(trial_tensors.STEPS_AFTER_JUMP):
            schedule.append((counted, jump if later == 0 else 0))
            counted += 1 + (jump if later == 0 else 0)
    return schedule


@dataclass(frozen=True, slots=True)
class _Phase:
    """A part of a trial. count: of parameters. steps: as _schedule has them."""

    count: int
    steps: Sequence[tuple[int, int]]


_PHASES = (
    _Phase(trial_tensors.SMALL, [(taken, 0) for taken in range(trial_tensors.FIRST_STEPS)]),
    _Phase(len(trial_tensors.SHAPES), _schedule()),
)
_CONFIRMING_PHASES = (
    _Phase(len(trial_tensors.SHAPES), [(taken, 0) for taken in range(trial_tensors.CONFIRMING_STEPS)]),
)


def judge(optimizer: torch.optim.Optimizer, group: int) -> TrialVerdict:
    """Tries the optimizer with the options that the group has now, and returns the verdict.

    Changes nothing of the optimizer, nor of the global random numbers.
    """
    own = optimizer.param_groups[group]
    if own.get("differentiable"):
        return TrialVerdict(False, "its step is differentiated")
    name = for_each_parameter(own)
    if name is not None:
        return TrialVerdict(False, f"its option {name!r} seems to hold something for each parameter")
    try:
        attributes = attributes_of(optimizer)
    except HoldsParameters as error:
        return TrialVerdict(False, str(error))
    kinds = kinds_of(own["params"])
    with torch.random.fork_rng(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # they were made, or will be, where the script calls the optimizer
        precise = _try_all_ways(_Trial(optimizer, group, attributes, torch.float64, kinds[0][1]), _PHASES)
        if isinstance(precise, TrialVerdict) and not precise.is_elementwise:
            return precise
        # some do otherwise in the parameters' own precision, and a few know no other
        phases = _PHASES if isinstance(precise, str) else _CONFIRMING_PHASES
        verdicts = []
        for dtype, device in kinds:
            coarse = _try_all_ways(_Trial(optimizer, group, attributes, dtype, device), phases)
            if isinstance(coarse, TrialVerdict):
                if not coarse.is_elementwise:
                    return coarse
                verdicts.append(coarse)
    if verdicts:
        return verdicts[0]
    return (
        precise
        if isinstance(precise, TrialVerdict)
        else TrialVerdict(False, f"its step could not be tried: {precise}")
    )


def same_with_foreach(optimizer: torch.optim.Optimizer, group: int) -> bool:
    """Tells whether foreach=True gives the same bits, for a group whose judge has found nothing against it."""
    given = optimizer.param_groups[group].get("foreach")
    return all(
        _same_with_foreach(optimizer, group, given, dtype, device)
        for dtype, device in kinds_of(optimizer.param_groups[group]["params"])
    )


def _same_with_foreach(
    optimizer: torch.optim.Optimizer, group: int, given: bool | None, dtype: torch.dtype, device: torch.device
) -> bool:
    try:
        attributes = attributes_of(optimizer)
        count = len(trial_tensors.SHAPES)
        parameters = [trial_tensors.parameters(dtype, device, count) for _ in range(2)]
        both = [like(optimizer, group, own, attributes, constructed=False) for own in parameters]
        for one, value in zip(both, (given, True), strict=True):
            one.param_groups[0]["foreach"] = value
        drawn = trial_tensors.gradients(dtype, device, count)
        with torch.random.fork_rng(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for _ in range(trial_tensors.CONFIRMING_STEPS):
                gradients = next(drawn)
                for one, own in zip(both, parameters, strict=True):
                    _step(one, own, gradients, closes=False)
    except Exception:  # noqa: BLE001 (an optimizer that knows no foreach, or can't be tried: it stays as it is)
        return False
    return all(map(torch.equal, *parameters))


def kinds_of(parameters: Sequence[Tensor]) -> list[tuple[torch.dtype, torch.device]]:
    """Returns the precisions and the devices of a group's parameters; at least one."""
    found = dict.fromkeys((p.dtype, p.device) for p in parameters if p.is_floating_point())
    return list(found) or [(torch.float32, torch.device("cpu"))]


@dataclass(frozen=True, slots=True)
class _Trial:
    """A trial of the options of one group, in one dtype. attributes: of attributes_of."""

    optimizer: torch.optim.Optimizer
    group: int
    attributes: dict[str, Any]
    dtype: torch.dtype
    device: torch.device


def _try_all_ways(trial: _Trial, phases: Sequence[_Phase]) -> TrialVerdict | str:
    """Tries the ways to make and to call an optimizer, until one gives a verdict.

    Returns a string if there was no trial in any way: why.
    """
    reason = ""
    for constructed in (True, False):
        for closes in (False, True):
            found: TrialVerdict | str = _YES
            for phase in phases:
                found = _try(trial, constructed, closes, phase)
                if found is not _YES:
                    break
            if found is _YES and not closes:
                with_closure = _try(trial, constructed, True, phases[0])
                # One that takes none is fine
                return with_closure if isinstance(with_closure, TrialVerdict) else found
            if isinstance(found, TrialVerdict):
                return found
            reason = reason or found
    return reason


def _try(trial: _Trial, constructed: bool, closes: bool, phase: _Phase) -> TrialVerdict | str:
    """Runs one phase of a trial and returns its verdict, or a string that says why there was no trial.

    constructed: see trial_instance.like. closes: give step() a closure.
    """
    pairs = []
    for _ in range(2):
        parameters = trial_tensors.parameters(trial.dtype, trial.device, phase.count)
        try:
            one = like(trial.optimizer, trial.group, parameters, trial.attributes, constructed=constructed)
        except Exception as error:  # noqa: BLE001 (whatever a constructor that we do not know makes of it: no trial)
            return f"{type(error).__name__}: {error}"
        pairs.append((parameters, one))
    (apart, alone), (together, blocked) = pairs
    step = FusedStep(lambda _: (True,), sizes=trial_tensors.SIZES)
    blocked.register_step_pre_hook(step.before)
    blocked.register_step_post_hook(step.after)
    drawn = trial_tensors.gradients(trial.dtype, trial.device, phase.count)
    for taken, ahead in phase.steps:
        gradients = next(drawn)
        if ahead:
            counts_of_steps(alone, taken, ahead)
            counts_of_steps(blocked, taken, ahead)
        random_numbers = torch.random.get_rng_state()
        try:
            _step(alone, apart, gradients, closes)
        except Exception as error:  # noqa: BLE001 (an optimizer that does not take such parameters: no trial)
            return f"{type(error).__name__}: {error}"
        if not torch.equal(torch.random.get_rng_state(), random_numbers):
            return TrialVerdict(False, "it draws random numbers, which would be others on a block")
        try:
            _step(blocked, together, gradients, closes)
        except FusedOptimizerError as error:
            return TrialVerdict(False, str(error.__cause__ or error))
        except Exception as error:  # noqa: BLE001 (it took them one by one, but does not take blocks)
            return TrialVerdict(False, f"on a block its step raises {type(error).__name__}: {error}")
        difference = _difference(alone, apart, blocked, together, _TOLERANCE.get(trial.dtype, _COARSE))
        if difference is not None:
            return TrialVerdict(False, f"{difference} after {taken + 1} steps of a trial in {trial.dtype}")
    return _YES


def _step(
    optimizer: torch.optim.Optimizer,
    parameters: Sequence[torch.nn.Parameter],
    gradients: Sequence[Tensor],
    closes: bool,
) -> None:
    def fill() -> Any:
        """Sets the gradients. In a closure they follow where the parameters are by then: some move them before they
        call it."""
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient * (1 + 0.1 * parameter.detach().tanh()) if closes else gradient.clone()
        return torch.zeros((), dtype=torch.float32, device="cpu")

    fill()
    if closes:
        optimizer.step(fill)
    else:
        optimizer.step()


def _difference(
    alone: torch.optim.Optimizer,
    apart: list[torch.nn.Parameter],
    blocked: torch.optim.Optimizer,
    together: list[torch.nn.Parameter],
    tolerance: tuple[float, float],
) -> str | None:
    """Returns what is not equal, in words; None if all is."""
    for one, other in zip(apart, together, strict=True):
        if not bool(torch.isfinite(one).all()):
            return "parameters are not finite"
        if not _close(one, other, tolerance):
            return f"a parameter of shape {tuple(one.shape)} differs on a block"
        here, there = alone.state.get(one, {}), blocked.state.get(other, {})
        if list(here) != list(there):
            return f"the states of a parameter are {list(here)} alone, {list(there)} on a block"
        for name, value in here.items():
            if not _equal(value, there[name], tolerance):
                return f"the state {name!r} of a parameter of shape {tuple(one.shape)} differs on a block"
    return None


def _equal(one: Any, other: Any, tolerance: tuple[float, float]) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.shape == other.shape and one.dtype == other.dtype and _close(one, other, tolerance)
    if isinstance(one, dict) and isinstance(other, dict):
        return list(one) == list(other) and all(_equal(one[n], other[n], tolerance) for n in one)
    if isinstance(one, (list, tuple, deque)) and isinstance(other, (list, tuple, deque)):
        return len(one) == len(other) and all(
            _equal(a, b, tolerance) for a, b in zip(one, other, strict=True)
        )
    if isinstance(one, float) and isinstance(other, float):
        return abs(one - other) <= tolerance[0] * abs(one)
    return type(one) is type(other) and (not is_plain(one) or bool(one == other))


def _close(one: Tensor, other: Tensor, tolerance: tuple[float, float]) -> bool:
    if not (one.is_floating_point() or one.is_complex()):
        return bool(torch.equal(one, other))
    scale = float(one.detach().abs().max()) if one.numel() else 0.0
    return bool(torch.allclose(one, other, rtol=tolerance[0], atol=tolerance[1] * scale, equal_nan=True))
