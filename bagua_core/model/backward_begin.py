"""Calls back before a backward adds anything to a model's gradients.

A backward that passes through a model's output computes the gradient of that output first, and adds to a parameter's
.grad only after all paths to the parameter, so after that.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch


def announce_backward(outputs: Any, begins: Callable[[], None]) -> None:
    """Have `begins` called when a backward through `outputs` begins; now, if they hold no result that is known here.

    outputs: of a forward; tensors are looked for in lists, tuples, mappings and dataclasses. Leaves among them, such as
    a parameter, are no results: they outlive the step, and so would what is registered on them.
    """
    tensors = [t for t in _tensors(outputs) if t.requires_grad and not t.is_leaf]
    if not tensors:
        begins()
        return

    def gradient_computed(_: torch.Tensor) -> None:
        begins()

    for tensor in tensors:
        tensor.register_hook(gradient_computed)  # type: ignore[no-untyped-call]


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from _tensors(getattr(value, field.name))
