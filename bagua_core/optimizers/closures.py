"""Provides the replacement that an optimizer's step gets for a closure that was already called."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Evaluated:
    """A closure whose first result is known already. then: called after each further call."""

    def __init__(
        self, closure: Callable[[], Any], loss: Any, then: Callable[[], None] = lambda: None
    ) -> None:
        self._closure = closure
        self._first = [loss]
        self._then = then

    def __call__(self) -> Any:
        if self._first:
            return self._first.pop()
        loss = self._closure()
        self._then()
        return loss


def closure_of(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Callable[[], Any] | None, tuple[Any, ...], dict[str, Any]]:
    """Returns step()'s closure, and its other arguments."""
    if kwargs.get("closure") is not None:
        rest = dict(kwargs)
        return rest.pop("closure"), args, rest
    if args and callable(args[0]):
        return args[0], args[1:], kwargs
    return None, args, kwargs
