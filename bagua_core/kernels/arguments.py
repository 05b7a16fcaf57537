"""Checks the arguments of the public kernel functions; targets trust their arguments."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from bagua_core.kernels.errors import KernelArgumentError
from bagua_core.kernels.formats import ALIGNMENT
from bagua_core.kernels.interface import VALUE_DTYPES


def check_values(name: str, tensor: Tensor, like: Tensor | None = None) -> None:
    """Checks that `tensor` is contiguous, of a dtype of values and on the device of `like`. Raises
    KernelArgumentError."""
    if tensor.dtype not in VALUE_DTYPES:
        raise KernelArgumentError(f"{name} is {tensor.dtype}; convert it to float32, float16 or bfloat16")
    check_memory(name, tensor, like)


def check_memory(name: str, tensor: Tensor, like: Tensor | None = None) -> None:
    """Checks that `tensor` is dense, contiguous and on the device of `like`. Raises KernelArgumentError."""
    if tensor.layout != torch.strided:
        raise KernelArgumentError(f"{name} is {tensor.layout}; use .to_dense()")
    if not tensor.is_contiguous():
        raise KernelArgumentError(
            f"{name} of shape {tuple(tensor.shape)} is not contiguous; use .contiguous()"
        )
    if like is not None and tensor.device != like.device:
        raise KernelArgumentError(f"{name} is on {tensor.device}, the others on {like.device}; move it there")


def check_same_count(name: str, tensor: Tensor, like: Tensor) -> None:
    """Checks that `tensor` has as many elements as `like`. Raises KernelArgumentError."""
    if tensor.numel() != like.numel():
        raise KernelArgumentError(
            f"{name} has {tensor.numel()} elements, the others {like.numel()}; make them equal"
        )


def check_scale(name: str, scale: float) -> None:
    """Checks that `scale` is finite. Raises KernelArgumentError."""
    if not math.isfinite(scale):
        raise KernelArgumentError(f"{name}={scale}; use a finite number")


def as_rows(name: str, values: Tensor) -> Tensor:
    """Returns `values`, [count] or [rows, count], as [rows, count]. Raises KernelArgumentError."""
    if values.dim() not in (1, 2):
        raise KernelArgumentError(f"{name} has the shape {tuple(values.shape)}; use [count] or [rows, count]")
    return values.view(1, -1) if values.dim() == 1 else values


def as_compressed(
    name: str, tensor: Tensor, rows: int | None, size_bytes: int, like: Tensor | None = None
) -> Tensor:
    """Returns a compressed tensor as [rows, bytes]; rows None: any number above 0. Raises KernelArgumentError."""
    two = as_rows(name, tensor)
    if two.dtype != torch.uint8:
        raise KernelArgumentError(f"{name} is {tensor.dtype}; compressed tensors are uint8")
    check_memory(name, two, like)
    if two.shape[1] != size_bytes or two.shape[0] < 1 or (rows is not None and two.shape[0] != rows):
        wanted = f"[{rows or 'peers'}, {size_bytes}]"
        raise KernelArgumentError(
            f"{name} has the shape {tuple(tensor.shape)}, but this count and block size need {wanted}"
        )
    if two.numel() and two.data_ptr() % ALIGNMENT:
        raise KernelArgumentError(
            f"{name} begins at an address that is no multiple of {ALIGNMENT} bytes; use a tensor of its own or a row"
        )
    return two
