"""Provides sums of tensors with weights, in place, computed in fp32 whatever the dtypes."""

from __future__ import annotations

from torch import Tensor

from bagua_core.kernels import arguments
from bagua_core.kernels.errors import KernelArgumentError
from bagua_core.kernels.targets import kernels_for


def weighted_average(x: Tensor, y: Tensor, x_weight: float, y_weight: float) -> Tensor:
    """Sets x = x_weight * x + y_weight * y, in place; each product and the sum are rounded to fp32. Returns x.

    x, y: values of any one shape; dtypes may differ. Raises KernelArgumentError.
    """
    arguments.check_values("x", x)
    arguments.check_values("y", y, x)
    arguments.check_same_count("y", y, x)
    arguments.check_scale("x_weight", x_weight)
    arguments.check_scale("y_weight", y_weight)
    if x.numel():
        kernels_for(x).weighted_average(x.view(-1), y.view(-1), x_weight, y_weight)
    return x


def add_difference(x: Tensor, newer: Tensor, older: Tensor, scale: float = 1.0) -> Tensor:
    """Sets x = x + scale * (newer - older), in place. Returns x.

    Asynchronous averaging adds this when the mean of a snapshot arrives: whatever x did meanwhile stays.
    x: values. newer, older: values of one dtype, with as many elements as x. Raises KernelArgumentError.
    """
    arguments.check_values("x", x)
    for name, tensor in (("newer", newer), ("older", older)):
        arguments.check_values(name, tensor, x)
        arguments.check_same_count(name, tensor, x)
    if newer.dtype != older.dtype:
        raise KernelArgumentError(f"newer is {newer.dtype}, older {older.dtype}; make them equal")
    arguments.check_scale("scale", scale)
    if x.numel():
        kernels_for(x).add_difference(x.view(-1), newer.view(-1), older.view(-1), scale)
    return x
