"""Optimizers that call their closure once are recognised from their source."""

from __future__ import annotations

import ast
from collections.abc import Callable
from typing import Any

import pytest
import torch

from bagua_core.algorithms.qadam_optimizer import QAdamOptimizer
from bagua_core.optimizers import closure_calls
from bagua_core.optimizers.closure_calls import calls_closure_once

Closure = Callable[[], Any]
IN_TORCH = [
    kind
    for kind in vars(torch.optim).values()
    if isinstance(kind, type)
    and issubclass(kind, torch.optim.Optimizer)
    and kind not in (torch.optim.Optimizer, torch.optim.LBFGS)
]


class Inherits(torch.optim.SGD):
    pass


class Extends(torch.optim.SGD):
    def step(self, closure: Closure | None = None) -> Any:  # type: ignore[override]
        return super().step(closure)


class ExtendsRepeating(torch.optim.LBFGS):
    def step(self, closure: Closure) -> Any:  # type: ignore[override]
        return super().step(closure=closure)


class Twice(torch.optim.SGD):
    def step(self, closure: Closure | None = None) -> Any:  # type: ignore[override]
        assert closure is not None
        closure()
        return closure()


class Loops(torch.optim.SGD):
    def step(self, closure: Closure | None = None) -> Any:  # type: ignore[override]
        for _ in range(self.defaults["momentum"]):
            closure = torch.enable_grad()(closure)
            closure()


class HandsOn(torch.optim.SGD):
    def step(self, closure: Closure | None = None) -> Any:  # type: ignore[override]
        return self.search(closure)

    def search(self, closure: Any) -> Any:
        return closure() + closure()


class MovesFirst(torch.optim.SGD):
    """As SAM does."""

    def step(self, closure: Closure | None = None) -> Any:  # type: ignore[override]
        assert closure is not None
        closure = torch.enable_grad()(closure)
        self.first_step()
        loss = closure()
        self.second_step()
        return loss

    def first_step(self) -> None: ...

    def second_step(self) -> None: ...


class MovesInLoop(torch.optim.SGD):
    def step(self, closure: Closure | None = None) -> Any:  # type: ignore[override]
        for group in self.param_groups:
            group["params"][0].add_(1)
        return closure() if closure is not None else None


class Forgets(torch.optim.SGD):
    def step(self, closure: Closure | None = None) -> Any:  # type: ignore[override]
        if closure is not None:
            super().zero_grad()
            closure()


class Checks(torch.optim.SGD):
    """As optimizers for training in 8 bits do, and those without a schedule."""

    def step(self, closure: Closure | None = None) -> Any:  # type: ignore[override]
        if not self.param_groups[0].get("train_mode", True):
            raise RuntimeError
        self.steps = getattr(self, "steps", 0) + 1
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.zero_grad()
        return loss


@pytest.mark.parametrize("kind", [*IN_TORCH, QAdamOptimizer, Inherits, Extends, Checks])
def test_the_usual_form_calls_it_once(kind: type[torch.optim.Optimizer]) -> None:
    assert len(IN_TORCH) > 10
    assert calls_closure_once(kind)


@pytest.mark.parametrize("kind", [torch.optim.LBFGS, ExtendsRepeating, Twice, Loops, HandsOn])
def test_others_may_call_it_again(kind: type[torch.optim.Optimizer]) -> None:
    assert not calls_closure_once(kind)


@pytest.mark.parametrize("kind", [MovesFirst, MovesInLoop, Forgets])
def test_one_that_does_something_before_the_call_is_not_of_the_usual_form(
    kind: type[torch.optim.Optimizer],
) -> None:
    assert not calls_closure_once(kind)


def test_what_has_no_source_may_call_it_again() -> None:
    made: dict[str, Any] = {"torch": torch}
    exec("class Made(torch.optim.SGD):\n    def step(self, closure=None):\n        return closure()", made)
    assert not calls_closure_once(made["Made"])


def test_a_parse_that_other_threads_disturbed_is_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    """CPython 3.11 counts the depth of ast.parse for all threads together."""
    parse, disturbed = ast.parse, iter([True, True])

    def sometimes(*arguments: Any) -> ast.Module:
        if next(disturbed, False):
            raise SystemError("AST constructor recursion depth mismatch (before=39, after=35)")
        return parse(*arguments)

    monkeypatch.setattr(ast, "parse", sometimes)
    monkeypatch.setattr(closure_calls, "_known", {})
    assert calls_closure_once(torch.optim.SGD)
    assert next(disturbed, None) is None, "it was disturbed twice"
