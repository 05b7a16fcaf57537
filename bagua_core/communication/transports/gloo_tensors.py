"""Checks what Gloo's operations take: contiguous CPU tensors, as bytes, under tags that slices do not use."""

from __future__ import annotations

import torch

from bagua_core.communication import slices


def check_usable(tensor: torch.Tensor) -> None:
    if tensor.device.type != "cpu":
        raise ValueError(f"the Gloo communicator carries CPU tensors, not {tensor.device}")
    if not tensor.is_contiguous():
        raise ValueError(f"a collective needs a contiguous tensor; this one has strides {tensor.stride()}")


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the same memory as bytes: moving data must not depend on which types Gloo can add."""
    return tensor.reshape(-1).view(torch.uint8)


def check_tag(tag: int) -> None:
    if not 0 <= tag < slices.FIRST_TAG:
        raise ValueError(f"tag {tag} is not within 0 and {slices.FIRST_TAG - 1}")
