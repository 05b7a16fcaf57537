"""Finds optimizers that another one steps, such as the base optimizer of SAM, and keeps what they share with it.

Their state is none of the outer one's state_dict, so it would neither travel nor be undone. An outer optimizer that has
the inner one's state for its own needs nothing of this.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch


def with_inner(optimizers: Iterable[torch.optim.Optimizer]) -> list[torch.optim.Optimizer]:
    """Returns each optimizer once, followed by those in its attributes that have a state of their own."""
    found: list[torch.optim.Optimizer] = []
    for optimizer in optimizers:
        for each in _reached(optimizer, []):
            if not any(_state_of(each) is _state_of(known) for known in found):
                found.append(each)
    return found


def _state_of(optimizer: torch.optim.Optimizer) -> object:
    """Returns the optimizer's state, or the optimizer itself if it is of another class than torch's, without a
    state."""
    return getattr(optimizer, "state", optimizer)


def _reached(
    optimizer: torch.optim.Optimizer, path: list[torch.optim.Optimizer]
) -> Iterator[torch.optim.Optimizer]:
    """Yields the optimizer and those in its attributes. path: the optimizers that lead to it; one may refer back."""
    yield optimizer
    for value in getattr(optimizer, "__dict__", {}).values():
        for inner in _optimizers_in(value):
            if not any(inner is known for known in (*path, optimizer)):
                yield from _reached(inner, [*path, optimizer])


def _optimizers_in(value: Any) -> Iterator[torch.optim.Optimizer]:
    values = value.values() if isinstance(value, Mapping) else value
    for each in values if isinstance(value, Mapping | list | tuple) else (value,):
        if isinstance(each, torch.optim.Optimizer):
            yield each


@contextmanager
def same_groups(optimizers: Iterable[torch.optim.Optimizer]) -> Iterator[None]:
    """Keeps the optimizers' groups the same objects while they load states within the context, with what was loaded.

    `load_state_dict` makes new groups, and an outer optimizer's learning rates would be the inner one's no more.
    """
    reached = {id(o): o for outer in optimizers for o in _reached(outer, [])}
    before = [(o, o.param_groups, list(o.param_groups)) for o in reached.values()]
    yield
    for optimizer, whole, groups in before:
        loaded = optimizer.param_groups
        if loaded is whole or len(loaded) != len(groups):
            continue
        for group, values in zip(groups, loaded, strict=True):
            if group is not values:
                content = dict(values)
                group.clear()
                group.update(content)
        whole[:] = groups
        optimizer.param_groups = whole
