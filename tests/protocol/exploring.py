"""Visits every reachable state of a model, and finds the shortest history that breaks a rule."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Hashable, Iterable
from typing import Any, NamedTuple, Protocol, TypeVar

T = TypeVar("T")


class Violation(AssertionError):
    """A rule is broken; the message is followed by the history that leads there."""


class Exploration(NamedTuple):
    states: int
    coverage: Counter[str]


class Explored(Protocol):
    """A model whose states are hashable values. coverage: how often what was seen."""

    coverage: Counter[str]

    def initial(self) -> Any: ...

    def successors(self, state: Any) -> Iterable[tuple[str, Any, bool]]:
        """(what happens, the state after it, whether it is a fault). Raises Violation."""

    def check_stuck(self, state: Any) -> None:
        """Nothing but faults can happen in `state`. Raises Violation."""


def with_value(values: tuple[T, ...], place: int, value: T) -> tuple[T, ...]:
    """`values` with `value` at `place`."""
    return (*values[:place], value, *values[place + 1 :])


def explore(model: Explored, limit: int = 300_000) -> Exploration:
    """Visit every state. Raises Violation with the shortest history, AssertionError beyond `limit` states."""
    start = model.initial()
    parents: dict[Hashable, tuple[Hashable, str] | None] = {start: None}
    queue = deque([start])
    while queue:
        state = queue.popleft()
        moved = False
        try:
            for label, after, is_fault in model.successors(state):
                moved = moved or not is_fault
                if after not in parents:
                    parents[after] = (state, label)
                    queue.append(after)
            if not moved:
                model.check_stuck(state)
        except Violation as violation:
            labels = []
            step = parents[state]
            while step is not None:
                labels.append(step[1])
                step = parents[step[0]]
            raise Violation("\n  ".join([str(violation), *labels[::-1]])) from None
        if len(parents) > limit:
            raise AssertionError(f"more than {limit} states: the search is not complete")
    return Exploration(len(parents), model.coverage)
