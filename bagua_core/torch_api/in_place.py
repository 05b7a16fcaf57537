"""Provides the attributes of a model that was wrapped in place: hooks before and behind its forward, and no_sync.

All stay with that very model: a copy or a pickle of it comes with objects that do nothing.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from torch import nn

from bagua_core.model.backward_begin import announce_backward
from bagua_core.model.filler_buffers import FillerBuffers

if TYPE_CHECKING:
    from bagua_core.torch_api.wrapping import Wrapped


class BeforeForward:
    """Runs the core's part of a forward, before the model's own. A copy or a pickle of the model comes without it."""

    def __init__(self, model: nn.Module, handle: Wrapped, after: AfterForward) -> None:
        self._model = weakref.ref(model)
        self._handle = handle
        self._after = after

    def __call__(self, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        handle = self._handle
        if module is not self._model() or not handle.counts(module.training):
            return
        handle.forward_begins(inputs)
        # not train(): it would set the mode of the model, whose parts may differ
        handle.parallel.training = module.training
        handle.parallel()
        self._after.forward_begins(handle.parallel.filler_buffers())

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[()]]:
        return _nothing_at_forward, ()

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., None]:
        return nothing_at_forward


class AfterForward:
    """Takes back what the model's forward of a filler did to its buffers. Called for a forward that raises too. A copy
    or a pickle of the model comes without it."""

    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)
        self._fillers: FillerBuffers | None = None  # of the forward under way
        self._kept = contextlib.ExitStack()

    def forward_begins(self, fillers: FillerBuffers | None) -> None:
        """Saves the buffers before the forward of a filler. fillers: None for a forward of samples."""
        self._kept.close()  # of a forward that an interrupt ended
        self._fillers = fillers
        if fillers is not None:
            self._kept.enter_context(fillers.kept())

    def __call__(self, module: nn.Module, inputs: tuple[Any, ...], outputs: Any) -> None:
        if module is not self._model() or self._fillers is None:
            return
        fillers, self._fillers = self._fillers, None
        self._kept.close()
        announce_backward(outputs, fillers.backward_begins)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[()]]:
        return _nothing_at_forward, ()

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., None]:
        return nothing_at_forward


def nothing_at_forward(module: nn.Module, inputs: tuple[Any, ...], outputs: Any = None) -> None:
    return None


def _nothing_at_forward() -> Callable[..., None]:
    return nothing_at_forward


class NoSync:
    """Provides `model.no_sync` for a model that was wrapped in place. A copy of the model has none to hold back."""

    def __init__(self, no_sync: Callable[[], AbstractContextManager[None]]) -> None:
        self._no_sync = no_sync

    def __call__(self) -> AbstractContextManager[None]:
        return self._no_sync()

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[()]]:
        return _nothing_held_back, ()

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., AbstractContextManager[None]]:
        return contextlib.nullcontext


def _nothing_held_back() -> Callable[..., AbstractContextManager[None]]:
    return contextlib.nullcontext
