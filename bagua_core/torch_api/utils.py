"""Helpers that scripts of the original import: tensors flattened into one, and back."""

from __future__ import annotations

from collections.abc import Sequence

import torch

__all__ = ["flatten", "unflatten"]


def flatten(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Returns a dense tensor [elements of all] with the elements of `tensors`, in order; a copy.

    tensors: of one data type and device, at least one. Raises RuntimeError without any, as torch.cat.
    """
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def unflatten(flat: torch.Tensor, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Returns views of `flat` in the shapes of `tensors`.

    flat: as flatten returns it. Raises RuntimeError if it has another number of elements than `tensors` together.
    """
    parts = torch.split(flat, [tensor.numel() for tensor in tensors])
    return tuple(part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True))
