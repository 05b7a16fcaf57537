"""The attributes of a model that was wrapped in place: a hook before its forward, and no_sync.

Both stay with that very model: a copy or a pickle of it comes with objects that do nothing.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from torch import nn

if TYPE_CHECKING:
    from bagua_core.torch_api.wrapping import Wrapped


class BeforeForward:
    """The core's part of a forward, before the model's own. A copy or a pickle of the model comes without it."""

    def __init__(self, model: nn.Module, handle: Wrapped) -> None:
        self._model = weakref.ref(model)
        self._handle = handle

    def __call__(self, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        handle = self._handle
        if module is not self._model() or not handle.counts(module.training):
            return
        handle.forward_begins(inputs)
        # not train(): it would set the mode of the model, whose parts may differ
        handle.parallel.training = module.training
        handle.parallel()

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[()]]:
        return _nothing_before_forward, ()

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., None]:
        return nothing_before_forward


def nothing_before_forward(module: nn.Module, inputs: tuple[Any, ...]) -> None:
    return None


def _nothing_before_forward() -> Callable[..., None]:
    return nothing_before_forward


class NoSync:
    """model.no_sync of a model that was wrapped in place. A copy of the model has none to hold back."""

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
