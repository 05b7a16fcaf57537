"""Finds the optimizers of a model that the script does not pass: those made since this package was imported.

Owns the record of each. Scripts that were written for torch's DistributedDataParallel create their optimizer after the
model is wrapped and pass it to no function, but a failed step must hold it back.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable
from typing import Any

import torch

_made: weakref.WeakValueDictionary[int, torch.optim.Optimizer] = weakref.WeakValueDictionary()
_NOTED = "_bagua_noted"


def take_note() -> None:
    """Makes torch record every optimizer from now on. Doing it twice is harmless."""
    original = torch.optim.Optimizer.__init__
    if getattr(original, _NOTED, False):
        return
    numbers = iter(range(1 << 62))

    @functools.wraps(original)
    def noted(self: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        _made[next(numbers)] = self

    setattr(noted, _NOTED, True)
    torch.optim.Optimizer.__init__ = noted  # type: ignore[method-assign]


def optimizers_of(parameters: Iterable[torch.Tensor]) -> list[torch.optim.Optimizer]:
    """Returns the optimizers that step on any of `parameters`, in the order in which they were made: the same on all
    workers."""
    wanted = {id(p) for p in parameters}
    return [
        optimizer
        for _, optimizer in sorted(_made.items())
        if any(id(p) in wanted for group in optimizer.param_groups for p in group["params"])
    ]
