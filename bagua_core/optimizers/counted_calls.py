"""Refuses schedulers, scalers and averages of weights whose state would depend on the history of a deterministic job.

The loop body runs once for each shard that a worker has, so what counts its calls depends on the number of workers. The
state of an object that is not registered is not that of the job: a worker that joins has a new one. A rate that changes
between two shards shows in step_rates.py; one that changes after so many calls shows in the calls alone.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Iterable
from typing import Any, cast

import torch
from torch.amp.grad_scaler import GradScaler
from torch.optim.lr_scheduler import CosineAnnealingWarmRestarts, LRScheduler
from torch.optim.swa_utils import AveragedModel

from bagua_core.communication.step_interface import StepEngine
from bagua_core.errors import NotDeterministicError
from bagua_core.optimizers.script_checks import engine_that_trains, is_part_of_model
from bagua_core.optimizers.step_rates import RateChangedWithinStep

_COUNTED: dict[type[Any], str] = {
    LRScheduler: "step",
    GradScaler: "step",
    AveragedModel: "update_parameters",
}
"""The method of each class that a script calls once a step."""

_WATCHED = "_bagua_watched"

_registered: weakref.WeakSet[Any] = weakref.WeakSet()


class _Inside(threading.local):
    depth = 0


_inside = _Inside()  # watched calls under way in this thread


def watch_counted_calls() -> None:
    """Makes the counted methods of torch's classes, and of classes that are derived from them, check their calls in
    deterministic jobs. Objects that are made later are watched too. Doing it twice is harmless."""
    for kind, method in _COUNTED.items():
        _watch(kind, method)


def note_registered(stateful: object) -> None:
    """Notes that the state of `stateful` is part of the job's, with those of what it holds."""
    held = list(getattr(stateful, "__dict__", {}).values())
    for value in tuple(held):
        held += (
            value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
        )
    for found in (stateful, *held):
        if isinstance(found, tuple(_COUNTED)):
            _registered.add(found)


def _watch(kind: type[Any], method: str) -> None:
    """Replaces the method of the class, and of derived classes that have one of their own: torch has no hook for it."""
    original: Any = vars(kind).get(method)
    if original is not None and not hasattr(original, _WATCHED):

        @functools.wraps(original)
        def watched(self: Any, *args: Any, **keywords: Any) -> Any:
            if _inside.depth:  # a scheduler that another one calls is part of that one's state
                return original(self, *args, **keywords)
            is_schedule = isinstance(self, LRScheduler)
            # torch calls it in the constructor too
            before = -1 if getattr(self, "_is_initial", False) else getattr(self, "last_epoch", None)
            if not is_schedule:
                _check(self, method, (*args, *keywords.values()))
            _inside.depth += 1
            try:
                result = original(self, *args, **keywords)
            finally:
                _inside.depth -= 1
            # With the epoch as an argument the same call again changes nothing.
            if is_schedule and before != -1 and (before is None or before != self.last_epoch):
                _check(self, method, (), follows=bool(args or keywords) and _takes_epoch(self))
            return result

        setattr(watched, _WATCHED, True)
        setattr(kind, method, watched)
    for derived in kind.__subclasses__():
        _watch(derived, method)


def _check(called: Any, method: str, args: tuple[Any, ...], follows: bool = False) -> None:
    """Checks a call. args: of the call; none of a scheduler. follows: its state follows from the argument alone. Raises
    RateChangedWithinStep, NotDeterministicError."""
    engine = cast("StepEngine | None", engine_that_trains(_parameters_of(called, args)))
    if engine is None or not engine.virtual_shards:
        return
    kind = type(called).__name__
    # the job's scaler and its schedulers act at the end of a step only: optimizer_gate.py
    if engine.in_step and not engine.micro_batch.last and not isinstance(called, GradScaler):
        is_average = isinstance(called, AveragedModel)
        error = NotDeterministicError if is_average else RateChangedWithinStep
        raise error(
            f"{kind}.{method}() was called within step {engine.plan.step}, before its last shard: the loop body runs "
            "once a shard, so its state would depend on the number of workers. Pass the object to "
            f"bagua.register_state(){', and' if is_average else ', or'} call it if loader.is_at_step_end"
        )
    if called not in _registered and not follows and not is_part_of_model(engine, called):
        raise NotDeterministicError(
            f"{kind}.{method}() was called, and the {kind} is not registered: workers that join would begin with a new "
            "one, so the result would depend on the history of the job. Pass it to bagua.register_state()"
        )


def _takes_epoch(scheduler: LRScheduler) -> bool:
    """Tells whether the state after step(epoch) follows from the epoch alone."""
    return isinstance(scheduler, CosineAnnealingWarmRestarts) or hasattr(scheduler, "_get_closed_form_lr")


def _parameters_of(called: Any, args: tuple[Any, ...]) -> Iterable[torch.Tensor]:
    """Returns the parameters on which the call depends, or whose optimizer does."""
    if isinstance(called, AveragedModel):
        found: Iterable[torch.Tensor] = args[0].parameters() if args else ()
        return found
    if isinstance(called, GradScaler):
        optimizer = args[0] if args and called.is_enabled() else None
    else:
        optimizer = getattr(called, "optimizer", None)
    groups = getattr(optimizer, "param_groups", ())
    return (p for group in groups for p in group["params"])
