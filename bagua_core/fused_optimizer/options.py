"""Tells which of a group's options switch a rule on or off, and which only say how strongly it acts.

What an optimizer does with the elements of a parameter was tried out under certain switches; it says nothing about
others.
"""

from __future__ import annotations

import operator
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from torch import Tensor

_PER_PARAMETER = ("params", "param_names")


def without_parameters(group: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name not in _PER_PARAMETER}


def switches(group: Mapping[str, Any]) -> Hashable:
    """Returns a key that stays equal as long as no option changes its type, its truth or its words.

    A number counts as zero or not zero.
    """
    return tuple((name, _switch(value)) for name, value in group.items() if name not in _PER_PARAMETER)


def _switch(value: Any) -> Hashable:
    kind = type(value)
    if kind is float or kind is int:
        return kind, value == 0
    if value is None or kind is bool or kind is str:
        return (value,)
    if isinstance(value, Tensor):
        return "tensor"
    if kind is tuple or kind is list:
        return kind, tuple(map(_switch, value))
    return (kind,)


class SwitchWatch:
    """Tells whether a step begins under the same switches as the one before. found: those of each group, as last taken.

    Most steps change no option at all, which the objects themselves tell in a fraction of the time that it takes to
    work out switches.
    """

    def __init__(self) -> None:
        self.found: list[Hashable] = []
        self._objects: list[
            tuple[Any, ...]
        ] = []  # names and values; kept, so that no other object can be the same

    def has_changed(self, groups: Sequence[Mapping[str, Any]]) -> bool:
        """Tells whether the switches have changed since `take`."""
        if self._objects and _are_the_same(_objects(groups), self._objects):
            return False
        if [switches(group) for group in groups] != self.found:
            return True
        self.take(groups)  # other numbers, and no more
        return False

    def take(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Records the switches as they are now, for comparison."""
        self.found = [switches(group) for group in groups]
        told = all(_tells_by_itself(v) for group in groups for v in without_parameters(group).values())
        self._objects = _objects(groups) if told else []


def _objects(groups: Sequence[Mapping[str, Any]]) -> list[tuple[Any, ...]]:
    return [(*group, *group.values()) for group in groups]


def _are_the_same(some: list[tuple[Any, ...]], others: list[tuple[Any, ...]]) -> bool:
    return len(some) == len(others) and all(
        len(one) == len(other) and all(map(operator.is_, one, other))
        for one, other in zip(some, others, strict=True)
    )


def _tells_by_itself(value: Any) -> bool:
    """Tells whether the value's switch is the same as long as it is the same object: a list may change inside."""
    kind = type(value)
    if kind is tuple:
        return all(map(_tells_by_itself, value))
    return value is None or kind in (float, int, bool, str) or isinstance(value, Tensor)


def for_each_parameter(group: Mapping[str, Any]) -> str | None:
    """Returns the name of an option that seems to hold something for each parameter, in their order; None if there is
    none."""
    count = len(group["params"])
    for name, value in without_parameters(group).items():
        if isinstance(value, (list, tuple)) and len(value) == count > 0:
            if any(isinstance(item, (Tensor, str, list, tuple, dict)) for item in value) or count > 8:
                return name
        elif isinstance(value, dict) and any(isinstance(key, Tensor) for key in value):
            return name
    return None
