"""Lets optimizers and schedulers step only after a step's last micro-batch, and only if the step did not fail.

Owns the replacement of `step` on the objects of the script. Keeps what schedulers and GradScaler look for on
an optimizer, so that neither warns. Decides nothing about steps itself: it asks the engine.
"""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.amp.grad_scaler import GradScaler
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from bagua_core import tracing
from bagua_core.communication.step_interface import StepEngine, StepPlan
from bagua_core.model.optimizer_steps import optimizer_steps_of
from bagua_core.model.scaler_state import unchanged_scale
from bagua_core.optimizers.closure_calls import calls_closure_once
from bagua_core.optimizers.closures import Evaluated, closure_of
from bagua_core.optimizers.counted_calls import note_registered, watch_counted_calls
from bagua_core.optimizers.repeated_closure import (
    Before,
    RepeatedClosure,
    StepAbandoned,
    check_has_job_loss,
    job_loss,
)
from bagua_core.optimizers.script_checks import checks_of, gated_step

_GATED = "_bagua_gated"


class _Gate:
    """Holds the engine that a replaced method asks; None once its training is over: the method is the object's own
    then."""

    def __init__(self, engine: StepEngine) -> None:
        self.engine: StepEngine | None = engine


def _gate_of(method: Any) -> _Gate | None:
    gate = getattr(method, _GATED, None)
    return gate if isinstance(gate, _Gate) else None


def release(gated: object, engine: StepEngine) -> None:
    """Gives an optimizer, scheduler or scaler its own methods back, unless another engine has gated it since."""
    for name in ("step", "update"):
        gate = _gate_of(getattr(gated, name, None))
        if gate is not None and gate.engine is engine:
            gate.engine = None
    if isinstance(gated, LRScheduler | ReduceLROnPlateau) and _engines.get(gated) is engine:
        del _engines[gated]


def gate_optimizer(optimizer: torch.optim.Optimizer, engine: StepEngine) -> None:
    """Makes optimizer.step() act only at the end of a step that did not fail, and else return None.

    With a closure, the closure runs first and the decision is made after it: its backward is the step's reduction. An
    optimizer that calls its closure again (LBFGS), or after it has moved parameters (SAM), sees the job's loss, and its
    step is undone if a later call fails. Doing it twice is harmless.
    """
    if engine.virtual_shards:
        watch_counted_calls()
    original: Callable[..., Any] = optimizer.step
    known = _gate_of(original)
    if known is not None:
        known.engine = engine
        return
    gate = _Gate(engine)
    parts: list[StepPlan] = []  # of the last micro-batch before a step's last one that had a closure

    @functools.wraps(original)
    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        self._opt_called = True  # what schedulers look at before they warn about the order of calls
        engine = gate.engine
        if engine is None:
            return original(*args, **kwargs)
        closure, args, kwargs = closure_of(args, kwargs)
        if engine.step_failed:
            return None if closure is None else closure()  # a script may look at the loss
        repeats, is_called, loss = False, False, None
        if closure is not None:
            repeats = not calls_closure_once(type(self))
            if repeats and engine.in_step:
                check_has_job_loss(self, engine.micro_batch)
            is_called = not (repeats and _calls_first(engine))
            loss = closure() if is_called else None
            if engine.step_failed:
                return loss
        elif not engine.in_step and not _has_gradient(self):
            # Before the loop: it moves nothing, and quiets a scheduler's warning
            return original(*args, **kwargs)
        steps, micro_batch = optimizer_steps_of(engine), engine.micro_batch
        steps.called(self, micro_batch)
        if not micro_batch.last:
            if closure is not None:
                parts[:] = [engine.plan]
            return loss
        checks_of(engine).check_step(self)
        steps.stepped()
        if repeats and is_called:
            loss = job_loss(loss, engine)
            if engine.step_failed:
                return loss
        if not engine.takes_optimizer_step(final=not repeats) or engine.step_failed:
            return loss
        with gated_step(), tracing.span("optimizer"):
            if closure is None:
                result = original(*args, **kwargs)
            elif not repeats:
                result = original(Evaluated(closure, loss), *args, **kwargs)
            else:
                before = Before(self)
                again = RepeatedClosure(closure, before, engine, _refusal(self, engine, tuple(parts)))
                if is_called:
                    again.called_already(loss)
                parts.clear()
                result = _whole_step(before, engine, lambda: original(again, *args, **kwargs), again)
        engine.optimizer_stepped(self)
        return result

    setattr(step, _GATED, gate)
    # a bound method, because a scheduler made later takes it apart by __func__
    optimizer.step = types.MethodType(step, optimizer)  # type: ignore[method-assign]


def _has_gradient(optimizer: torch.optim.Optimizer) -> bool:
    return any(p.grad is not None for group in optimizer.param_groups for p in group["params"])


def _calls_first(engine: StepEngine) -> bool:
    """Tells whether an optimizer may move parameters before the first call of its closure: a reduction of the step is
    in, so no copy of the state waits for one."""
    return engine.is_final and engine.micro_batch.last  # before the step has begun it is not final


def _whole_step(before: Before, engine: StepEngine, step: Callable[[], Any], calls: RepeatedClosure) -> Any:
    """Runs a step that is final after the last call of its closure, or undone, whatever ended it."""
    is_whole = False
    try:
        result = step()
        is_whole = True
    except StepAbandoned:
        return calls.loss
    finally:
        if not is_whole:
            before.put_back()
    engine.optimizer_step_is_final()
    return result


def _refusal(
    optimizer: torch.optim.Optimizer, engine: StepEngine, parts: Sequence[StepPlan]
) -> Callable[[bool], str | None]:
    """Returns the function that says why an optimizer must not call its closure again; see RepeatedClosure."""
    kind = type(optimizer).__name__

    def why_not(moved: bool) -> str | None:
        calls = f"{kind} calls its closure " + ("after it has moved parameters" if moved else "several times")
        if list(parts) == [engine.plan]:
            return f"{calls}, and each call sees the last micro-batch of the step only; leave out max_local_batch_size"
        if engine.replica_size > 1:
            return (
                f"{calls}, and the workers of a replica may see different ends of a call that fails; use an optimizer "
                "that calls it once, before it moves parameters"
            )
        if moved or engine.communicator() is None or checks_of(engine).has_equal_states(optimizer):
            return None
        return (
            f"{calls} and decides by each worker's own gradients when to stop, but all workers must reduce equally "
            'often; use algorithm="gradient_allreduce"'
        )

    return why_not


# A scheduler's state_dict is its whole __dict__, so neither engine nor replacement may live there.
_engines: weakref.WeakKeyDictionary[Any, StepEngine] = weakref.WeakKeyDictionary()
_gated_classes: dict[type, type] = {}


def gate_registered(stateful: object, engine: StepEngine) -> None:
    """Makes a registered scheduler or scaler act at the end of steps only; other objects stay as they are."""
    note_registered(stateful)
    if isinstance(stateful, (LRScheduler, ReduceLROnPlateau)):
        gate_scheduler(stateful, engine)
    elif isinstance(stateful, GradScaler):
        gate_scaler(stateful, engine)


def gate_scheduler(scheduler: LRScheduler | ReduceLROnPlateau, engine: StepEngine) -> None:
    """Makes scheduler.step() act where optimizer.step() does, and always outside steps."""
    kind = type(scheduler)
    if kind in _gated_classes.values():
        _engines[scheduler] = engine
        return
    if kind not in _gated_classes:
        _gated_classes[kind] = _gated_scheduler_class(kind)
    _engines[scheduler] = engine
    scheduler.__class__ = _gated_classes[kind]


def _gated_scheduler_class(kind: type) -> type:
    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        engine = _engines.get(self)
        if engine is not None and _holds_back(engine):
            return None
        return kind.step(self, *args, **kwargs)  # type: ignore[attr-defined]

    return type(kind.__name__, (kind,), {"step": step, "__module__": kind.__module__})


def gate_scaler(scaler: GradScaler, engine: StepEngine) -> None:
    """Makes scaler.update() move the scale only once a step.

    Between micro-batches the scale must stay: contributions of one step are added up.
    """
    original: Callable[..., None] = scaler.update
    known = _gate_of(original)
    if known is not None:
        known.engine = engine
        return
    gate = _Gate(engine)

    @functools.wraps(original)
    def update(self: Any, new_scale: float | torch.Tensor | None = None) -> None:
        engine = gate.engine
        if engine is not None and new_scale is None and _holds_back(engine) and self.is_enabled():
            # the same scale again: torch then only forgets what this micro-batch's optimizers found
            original(unchanged_scale(self))
            return
        original(new_scale)

    setattr(update, _GATED, gate)
    scaler.update = types.MethodType(update, scaler)  # type: ignore[method-assign]


def _holds_back(engine: StepEngine) -> bool:
    return engine.in_step and (engine.step_failed or not engine.micro_batch.last)
