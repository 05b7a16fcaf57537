"""The hooks of a reducer on its parameters' gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch


class GradientHooks:
    """The hooks on some parameters. accumulated: called with a parameter when a backward has added to its .grad.
    before: makes, for a parameter, what is called with a gradient that is about to be added."""

    def __init__(
        self,
        accumulated: Callable[[torch.Tensor], None],
        before: Callable[[torch.nn.Parameter], Callable[[torch.Tensor], None]],
    ) -> None:
        self._accumulated, self._before = accumulated, before
        self._known: set[int] = set()
        self._known_before: set[int] = set()
        self._handles: list[Any] = []

    def add(self, parameters: Iterable[torch.nn.Parameter], before: bool) -> None:
        """Adds hooks to those parameters that require a gradient, once each. before: also the second kind of hook."""
        for p in parameters:
            if p.requires_grad and id(p) not in self._known:
                self._known.add(id(p))
                self._handles.append(p.register_post_accumulate_grad_hook(self._accumulated))  # type: ignore[no-untyped-call]
            if p.requires_grad and before and id(p) not in self._known_before:
                self._known_before.add(id(p))
                self._handles.append(p.register_hook(self._before(p)))  # type: ignore[no-untyped-call]

    @property
    def are_removed(self) -> bool:
        return not self._handles

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
