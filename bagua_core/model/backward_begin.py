"""Calls back before a backward adds anything to a model's gradients.

A backward that passes through a model's output computes the gradient of that output first, and adds to a parameter's
.grad only after all paths to the parameter, so after that.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from bagua_core.errors import UserError


class UnscalableOutputs(UserError, TypeError):
    """Raised if gradients of an uneven part of a batch cannot be weighted."""


def announce_backward(outputs: Any, begins: Callable[[], None]) -> None:
    """Has `begins` called when a backward through `outputs` begins; now, if they hold no result that is known here.

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


def scale_gradients(outputs: Any, factor: float) -> None:
    """Multiplies every gradient that a backward through `outputs` brings to what they were made of.

    outputs: as in `announce_backward`. Raises UnscalableOutputs if they hold no result that is known here.
    """
    tensors = [t for t in _tensors(outputs) if t.requires_grad and not t.is_leaf]
    if not tensors:
        raise UnscalableOutputs(
            "the workers of a replica have different numbers of samples in this batch, and the model's output, a "
            f"{type(outputs).__name__}, holds no tensor whose gradient could be weighted; return tensors in a list, "
            "tuple, dict or dataclass, or choose a global_batch_size that divides evenly"
        )
    for tensor in tensors:
        tensor.register_hook(lambda gradient: gradient * factor)  # type: ignore[no-untyped-call]


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
