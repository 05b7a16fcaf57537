"""Helpers that scripts of the original import: tensors flattened into one, and back."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def flatten(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Returns one dense tensor with the elements of all, in order. They must be of one data type."""
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def unflatten(flat: torch.Tensor, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Returns views of `flat` in the shapes of `tensors`."""
    parts = torch.split(flat, [tensor.numel() for tensor in tensors])
    return tuple(part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True))
