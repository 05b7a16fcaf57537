"""Visits every reachable state of the explored protocol, and says how one was reached."""

from __future__ import annotations

import gc
from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import NamedTuple

from model import Model
from model_state import (
    Setup,
    State,
    Violation,
)


class Exploration(NamedTuple):
    """outcomes: what is left where nothing but faults can follow: the ledger, and who is how far."""

    states: int
    transitions: int
    coverage: Counter[str]
    outcomes: frozenset[object]


def explore(setup: Setup, limit: int = 2_000_000, prefix: Iterable[str] = ()) -> Exploration:
    """Visit every state reachable after the events of `prefix`.

    Raises Violation with the shortest history that leads to it.
    """
    collecting = gc.isenabled()
    gc.disable()  # states hold no cycles, and looking for some takes a fifth of the time
    try:
        return _explore(setup, limit, prefix)
    finally:
        if collecting:
            gc.enable()


def _explore(setup: Setup, limit: int, prefix: Iterable[str]) -> Exploration:
    model = Model(setup)
    start = model.initial()
    for label in prefix:
        possible = {text: after for text, after, _ in Model(replace(setup, eager=False)).successors(start)}
        start = possible[label]
    parents: dict[State, tuple[State, str] | None] = {start: None}
    queue = deque([start])
    transitions = 0
    outcomes: set[object] = set()
    while queue:
        s = queue.popleft()
        moved = False
        try:
            for label, after, is_fault in model.successors(s):
                transitions += 1
                moved = moved or not is_fault
                known = len(parents)
                parents.setdefault(after, (s, label))  # one hash of the state, which costs most
                if len(parents) > known:
                    queue.append(after)
                    try:
                        model.check(after)
                    except Violation as violation:
                        raise Violation(f"{violation} after: {label}") from None
            if not moved:
                model.check_stuck(s)
                outcomes.add((s.ledger, tuple((w.phase, w.chain) for w in s.workers)))
        except Violation as violation:
            raise Violation("\n  ".join([str(violation), *history(parents, s)])) from None
        if len(parents) > limit:
            raise AssertionError(f"more than {limit} states: the search is not complete")
    return Exploration(len(parents), transitions, model.coverage, frozenset(outcomes))


def history(parents: Mapping[State, tuple[State, str] | None], s: State) -> list[str]:
    labels = []
    step = parents[s]
    while step is not None:
        labels.append(step[1])
        step = parents[step[0]]
    return labels[::-1]
