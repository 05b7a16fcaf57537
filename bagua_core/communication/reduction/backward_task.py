"""Recognizes the backward of autograd to which a gradient belongs, and calls a function at the end of that backward."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch

from bagua_core.errors import UserError

current_task = torch._C._current_graph_task_id
"""Returns autograd's id of the backward that the calling thread computes."""


class NestedBackwardError(UserError, RuntimeError):
    """Gradients of one step came from a backward inside another backward."""


class _End:
    """A callable that autograd calls at the end of a backward. Only autograd holds it, so it lives as long as that
    backward."""

    def __init__(self, call: Callable[[], None], defers: bool) -> None:
        self._call = call
        self._defers = defers

    def __call__(self) -> None:
        if self._defers:  # behind all others that are queued by now
            self._defers = False
            torch.autograd.Variable._execution_engine.queue_callback(self)
        else:
            self._call()


class BackwardTask:
    """Tracks the backward under way. is_open: whether it has not reached its end: it raised, or it runs now."""

    def __init__(self) -> None:
        self.task: int | None = None
        """Autograd's id of it; None once it has reached its end."""
        self._end: weakref.ref[_End] | None = None

    @property
    def is_open(self) -> bool:
        return self.task is not None

    def is_new(self) -> bool:
        """Tells whether the gradient that is computed now is the first one of another backward. Raises
        NestedBackwardError if the one under way goes on after that."""
        if current_task() == self.task:
            return False
        if self._end is not None and self._end() is not None and self.is_open:
            raise NestedBackwardError(
                "a backward ran inside another one; if activation checkpointing is used, pass use_reentrant=False"
            )
        return True

    def begin(self, ended: Callable[[], None], defers: bool = False) -> None:
        """Begins a backward, and lets autograd call `ended` after its last gradient.

        defers: whether the call comes also after other callbacks of that moment, even those queued later: torch's
        sharding reduces some gradients at the end of the backward only.
        """
        end = _End(ended, defers)
        torch.autograd.Variable._execution_engine.queue_callback(end)
        self._end = weakref.ref(end)
        self.task = current_task()

    def close(self) -> None:
        self.task = None
