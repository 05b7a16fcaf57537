"""Converts gradients to steps of an Adam whose second moment rests, and back, and takes the step, in one pass each.

Checks and shapes; the arithmetic is in arithmetic.h.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from bagua_core.kernels import arguments
from bagua_core.kernels.errors import KernelArgumentError
from bagua_core.kernels.targets import kernels_for


def adam_steps(
    values: Tensor,
    second: Tensor,
    eps: float,
    reach: float,
    *,
    before: Tensor | None = None,
    after: Tensor | None = None,
    decay: float = 0.0,
) -> Tensor:
    """Sets values = x, in place, or values = after = decay * before + x, where x = values / (sqrt(second) + eps).

    In each block of 4,096 an |x| of more than `reach` times their mean becomes that (inf: none does). second: of the
    shape and dtype of `values`; infinite for elements that rest. before, after: float32 of that shape, both or neither;
    what is not finite is 0 in `after`. Returns values. Raises KernelArgumentError.
    """
    _check_alike(values=values, second=second)
    _check_positive("eps", eps)
    if not reach > 0:
        raise KernelArgumentError(f"reach={reach}; use a number above 0, or inf")
    arguments.check_scale("decay", decay)
    if (before is None) != (after is None):
        raise KernelArgumentError("one of before and after is missing; give both or neither")
    for name, tensor in (("before", before), ("after", after)):
        if tensor is not None:
            arguments.check_memory(name, tensor, values)
            arguments.check_same_count(name, tensor, values)
            if tensor.dtype != torch.float32:
                raise KernelArgumentError(f"{name} is {tensor.dtype}; use float32")
    if values.numel():
        flat_before, flat_after = (None if t is None else t.view(-1) for t in (before, after))
        kernels_for(values).adam_steps(
            values.view(-1), second.view(-1), flat_before, flat_after, eps, reach, decay
        )
    return values


def adam_gradients(values: Tensor, second: Tensor, eps: float) -> Tensor:
    """Converts steps back to gradients: values = values * (sqrt(second) + eps), in place, and 0 for elements that rest.

    second: of the shape and dtype of `values`. Returns values. Raises KernelArgumentError.
    """
    _check_alike(values=values, second=second)
    _check_positive("eps", eps)
    if values.numel():
        kernels_for(values).adam_gradients(values.view(-1), second.view(-1), eps)
    return values


def adam_update(
    parameter: Tensor,
    gradient: Tensor,
    first: Tensor,
    second: Tensor,
    *,
    share: float,
    weight_decay: float,
    eps: float,
    rate: float,
) -> Tensor:
    """Updates the first moment and the parameter, in place:

        first = first + share * (gradient + weight_decay * parameter - first)
        parameter = parameter - rate * first / (sqrt(second) + eps)

    All are of one shape and dtype. Returns parameter. Raises KernelArgumentError.
    """
    _check_alike(parameter=parameter, gradient=gradient, first=first, second=second)
    _check_positive("eps", eps)
    for name, scale in (("share", share), ("weight_decay", weight_decay), ("rate", rate)):
        arguments.check_scale(name, scale)
    if parameter.numel():
        kernels_for(parameter).adam_update(
            parameter.view(-1),
            gradient.view(-1),
            first.view(-1),
            second.view(-1),
            share,
            weight_decay,
            eps,
            rate,
        )
    return parameter


def _check_alike(**tensors: Tensor) -> None:
    (first_name, first), *others = tensors.items()
    arguments.check_values(first_name, first)
    for name, tensor in others:
        arguments.check_values(name, tensor, first)
        arguments.check_same_count(name, tensor, first)
        if tensor.dtype != first.dtype:
            raise KernelArgumentError(
                f"{name} is {tensor.dtype}, {first_name} {first.dtype}; make them equal"
            )


def _check_positive(name: str, number: float) -> None:
    if not (math.isfinite(number) and number > 0):
        raise KernelArgumentError(f"{name}={number}; use a finite number above 0")
