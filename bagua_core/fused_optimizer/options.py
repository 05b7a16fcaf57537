"""Which of a group's options switch a rule on or off, and which only say how strongly it acts?

What an optimizer does with the elements of a parameter was tried out under certain switches; it says nothing about
others.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

from torch import Tensor

_PER_PARAMETER = ("params", "param_names")


def without_parameters(group: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name not in _PER_PARAMETER}


def switches(group: Mapping[str, Any]) -> Hashable:
    """Equal as long as no option changes its type, its truth or its words: a number counts as zero or not zero."""
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


def for_each_parameter(group: Mapping[str, Any]) -> str | None:
    """The name of an option that seems to hold something for each parameter, in their order."""
    count = len(group["params"])
    for name, value in without_parameters(group).items():
        if isinstance(value, (list, tuple)) and len(value) == count > 0:
            if any(isinstance(item, (Tensor, str, list, tuple, dict)) for item in value) or count > 8:
                return name
        elif isinstance(value, dict) and any(isinstance(key, Tensor) for key in value):
            return name
    return None
