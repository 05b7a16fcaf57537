"""Collectives over values of the workers, for every integration: a mean, and a gather of tensors of unequal sizes."""

from __future__ import annotations

from typing import Any

import torch

import bagua_core as bagua


def mean(tensor: torch.Tensor) -> torch.Tensor:
    """The mean over the workers that have the job's state. A joiner, which contributes zeros, does not count."""
    values = tensor if tensor.is_floating_point() else tensor.float()
    summed = bagua.allreduce(torch.cat([values.flatten(), values.new_ones(1)]))
    return (summed[:-1] / summed[-1].clamp(min=1)).reshape(tensor.shape)


def gather_unequal(tensor: torch.Tensor, group: Any = None) -> list[torch.Tensor]:
    """Every worker's tensor, by rank. Their shapes may differ in size, not in the number of dimensions. A joiner has no
    value in its first step: its tensor is empty, and a single number is left out."""
    flat = tensor.reshape(1) if tensor.dim() == 0 else tensor
    shapes, rows = _shapes_and_rows(flat)
    # a worker was lost between the two: all that are left see it, and do both again
    while len(rows) < len(shapes):
        shapes, rows = _shapes_and_rows(flat)
    parts = [
        row[: int(shape.prod())].reshape(shape.tolist()) for row, shape in zip(rows, shapes, strict=True)
    ]
    return [part.reshape(()) for part in parts if part.numel()] if tensor.dim() == 0 else parts


def _shapes_and_rows(flat: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Every worker's shape, and its values padded to the longest."""
    shapes = bagua.allgather(torch.tensor(flat.shape, dtype=torch.int64, device="cpu"))
    padded = flat.new_zeros(int(shapes.prod(1).max()))
    padded[: flat.numel()] = flat.flatten()
    return shapes, bagua.allgather(padded)
