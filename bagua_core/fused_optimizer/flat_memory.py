"""Tells whether tensors lie one after the other already and whether they may be moved, and gathers gradients that are
new in each step.

A flat tensor has one dimension and holds its members' elements in the order in which they lie in each member's own
memory. Gradients that are new in each step are copied into one flat tensor for a block, used again in every step. On
the CPU the library copies all of them in one call, in as many threads as torch uses; torch's own way is a call for
each, in one thread where they are small.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from bagua_core.kernels.errors import KernelUnavailableError
from bagua_core.kernels.repeated_flatten import RepeatedFlatten

# What one tensor and its Python object count for; each further tensor with the same memory counts one more.
_ALONE = 2
_users_of_memory: Callable[[int], int] | None = getattr(torch._C, "_storage_Use_Count", None)


def is_like(tensor: Tensor, parameter: Tensor) -> bool:
    """Tells whether the elements lie in memory as those of `parameter`, without gaps."""
    # Strides of dimensions of size 1 say nothing
    return tensor.stride() == parameter.stride() or (tensor.is_contiguous() and parameter.is_contiguous())


def flat_of(tensor: Tensor) -> Tensor:
    """Returns [elements] over the same memory. tensor: dense."""
    return tensor.detach().as_strided((tensor.numel(),), (1,))


def cut(flat: Tensor, pieces: Sequence[int]) -> list[Tensor]:
    """Returns views of `flat` of so many elements each."""
    if len(pieces) == 1:
        return [flat.detach()]  # a tenth of what a split takes, and most blocks are in one piece
    found: list[Tensor] = list(torch.split(flat, list(pieces)))
    return found


def viewed(flat: Tensor, begin: int, parameter: Tensor) -> Tensor:
    """Returns the part of `flat` from element `begin` on, with the shape and memory order of `parameter`."""
    return flat.as_strided(parameter.shape, parameter.stride(), flat.storage_offset() + begin)


def lying_in_order(tensors: Sequence[Tensor]) -> Tensor | None:
    """Returns [elements of all] over their own memory if they lie one after the other in one memory, else None.

    tensors: dense, of one dtype.
    """
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
    """Returns `tensor`, or a copy if it begins anywhere but where its memory begins.

    For tensors to which sparse ones are added: torch (2.13) counts the offset twice then, and writes beyond the memory.
    """
    return tensor.clone() if tensor.storage_offset() else tensor


def may_move(parameter: Tensor) -> bool:
    """Tells whether nothing else is known to look at the parameter's memory, so that it can be given another.

    A view of a larger one (a bucket, a recurrent network's weights), or memory shared with other processes, stays.
    """
    memory: Any = parameter.untyped_storage()
    if memory.nbytes() != parameter.nbytes:
        return False
    if parameter.device.type == "cpu" and parameter.is_shared():  # type: ignore[no-untyped-call]
        return False
    return _users_of_memory is None or _users_of_memory(memory._cdata) <= _ALONE


class Gathered:
    """Copies of gradients in one flat tensor.

    flat: [elements], to be written to. views: of it, one for each gradient, of its shape and memory order.
    """

    def __init__(self, flat: Tensor, views: Sequence[Tensor]) -> None:
        self._flat = flat
        self._views = list(views)
        self._at_once = _at_once(flat, views)
        self._last: tuple[list[Tensor], int] | None = None  # the gradients, and the copy's version

    def gather(self, gradients: list[Tensor]) -> Tensor:
        """Copies the gradients into the flat tensor and returns it. gradients: of the views' shapes and dtype."""
        if self._at_once is not None and _are_plain(gradients):
            self._at_once(gradients)
        else:
            torch._foreach_copy_(self._views, gradients)
        self._last = gradients, self._flat._version
        return self._flat

    def give_back(self, are_written: bool) -> None:
        """Gives the gradients what the step wrote to their copies, and lets them go; the step is over.

        are_written: it wrote, in a way that tensors do not notice.
        """
        if self._last is not None:
            gradients, version = self._last
            if are_written or self._flat._version != version:
                torch._foreach_copy_(gradients, self._views)
        self._last = None


def _are_plain(tensors: list[Tensor]) -> bool:
    """Tells whether each is nothing but memory in the usual order; a subclass may have none."""
    return set(map(type, tensors)) == {Tensor} and all(map(Tensor.is_contiguous, tensors))


def _at_once(flat: Tensor, views: Sequence[Tensor]) -> RepeatedFlatten | None:
    if flat.device.type != "cpu" or not all(map(Tensor.is_contiguous, views)):
        return None
    try:
        return RepeatedFlatten(flat, [view.numel() for view in views])
    except KernelUnavailableError:
        return None  # torch's own way will do
