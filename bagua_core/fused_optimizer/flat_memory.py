"""Do tensors lie one after the other in memory already, and if not, may they be moved so that they do?

A flat tensor has one dimension and holds its members' elements in the order in which they lie in each member's own
memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

# What one tensor and its Python object count for; each further tensor with the same memory counts one more.
_ALONE = 2
_users_of_memory: Callable[[int], int] | None = getattr(torch._C, "_storage_Use_Count", None)


def is_like(tensor: Tensor, parameter: Tensor) -> bool:
    """Its elements lie in memory as those of `parameter`, without gaps."""
    return tensor.stride() == parameter.stride() or (
        tensor.is_contiguous() and parameter.is_contiguous()
    )  # strides of dimensions of size 1 say nothing


def flat_of(tensor: Tensor) -> Tensor:
    """[elements] over the same memory. tensor: dense."""
    return tensor.detach().as_strided((tensor.numel(),), (1,))


def cut(flat: Tensor, pieces: Sequence[int]) -> list[Tensor]:
    """Views of `flat` of so many elements each."""
    if len(pieces) == 1:
        return [flat.detach()]  # a tenth of what a split takes, and most blocks are in one piece
    found: list[Tensor] = list(torch.split(flat, list(pieces)))
    return found


def viewed(flat: Tensor, begin: int, parameter: Tensor) -> Tensor:
    """The part of `flat` from element `begin` on, with the shape and memory order of `parameter`."""
    return flat.as_strided(parameter.shape, parameter.stride(), flat.storage_offset() + begin)


def lying_in_order(tensors: Sequence[Tensor]) -> Tensor | None:
    """[elements of all] over their own memory if they lie one after the other in one memory, else None.

    tensors: dense, of one dtype."""
    first = tensors[0]
    width, at = first.element_size(), first.data_ptr()
    memory = first.untyped_storage()
    for tensor in tensors:
        if tensor.data_ptr() != at:
            return None
        at += tensor.numel() * width
    if at > memory.data_ptr() + memory.nbytes():
        return None  # neighbours by chance, in memories of their own
    return first.detach().as_strided((sum(t.numel() for t in tensors),), (1,))


def own_memory(tensor: Tensor) -> Tensor:
    """`tensor`, or a copy if it begins anywhere but where its memory begins.

    For tensors to which sparse ones are added: torch (2.13) counts the offset twice then, and writes beyond the memory.
    """
    return tensor.clone() if tensor.storage_offset() else tensor


def may_move(parameter: Tensor) -> bool:
    """Whether nothing else is known to look at its memory, so that it can be given another.

    A view of a larger one (a bucket, a recurrent network's weights), or memory shared with other processes, stays.
    """
    memory: Any = parameter.untyped_storage()
    if memory.nbytes() != parameter.nbytes:
        return False
    if parameter.device.type == "cpu" and parameter.is_shared():  # type: ignore[no-untyped-call]
        return False
    return _users_of_memory is None or _users_of_memory(memory._cdata) <= _ALONE
