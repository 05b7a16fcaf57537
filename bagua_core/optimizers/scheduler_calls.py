"""Refuses schedulers that count the bodies of a deterministic job's loop.

The body runs once for each shard that a worker has, so their schedules would depend on the number of workers. A rate
that changes between two shards shows in step_rates.py; one that changes after so many calls shows in the calls alone.
Schedulers that are the job's (optimizer_gate.py) are called at the end of a step only.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from bagua_core.communication.step_interface import StepReductions
from bagua_core.optimizers.step_rates import RateChangedWithinStep

_WATCHED = "_bagua_watched"

_engines: weakref.WeakKeyDictionary[torch.optim.Optimizer, StepReductions] = weakref.WeakKeyDictionary()


def watch_schedulers(optimizer: torch.optim.Optimizer, engine: StepReductions) -> None:
    """Makes step() of this optimizer's schedulers raise RateChangedWithinStep where it advances the schedule before the
    last shard of a step. Schedulers that are made later are watched too."""
    _engines[optimizer] = engine
    _watch(LRScheduler)


def _watch(kind: type[Any]) -> None:
    """Replaces `step` of the class, and of derived classes that have one of their own: torch has no hook for it."""
    original: Any = vars(kind).get("step")
    if original is not None and not hasattr(original, _WATCHED):

        @functools.wraps(original)
        def step(self: Any, *args: Any, **keywords: Any) -> Any:
            before = getattr(self, "last_epoch", None)
            result = original(self, *args, **keywords)
            # -1: it is being made. With the epoch as an argument the same call again changes nothing.
            if before not in (-1, getattr(self, "last_epoch", None)):
                _check(self)
            return result

        setattr(step, _WATCHED, True)
        kind.step = step
    for derived in kind.__subclasses__():
        _watch(derived)


def _check(scheduler: Any) -> None:
    optimizer = getattr(scheduler, "optimizer", None)
    engine = None if optimizer is None else _engines.get(optimizer)
    if engine is None or not engine.in_step or engine.micro_batch.last:
        return
    raise RateChangedWithinStep(
        f"{type(scheduler).__name__}.step() was called within step {engine.plan.step}, before its last shard: the loop "
        "body runs once a shard, so the schedule would depend on the number of workers. Pass the scheduler to "
        "bagua.register_state(), or call it if loader.is_at_step_end"
    )
