"""Writes tensors of which several elements may be one place in memory, as `expand` makes them."""

from __future__ import annotations

import torch


def write(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """Copies `value`, of the same shape, to `tensor`. Elements that are one place in memory have one value there.

    torch refuses to write a tensor that was expanded, for its elements may get several values.
    """
    for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if size > 1 and stride == 0:
            tensor, value = tensor.narrow(dim, 0, 1), value.narrow(dim, 0, 1)
    tensor.copy_(value)
