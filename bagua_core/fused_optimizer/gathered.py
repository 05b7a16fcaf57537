"""Where do gradients come together that are new in each step, and how does what a step writes to them get back?

One flat copy for a block, used again in every step. On the CPU the library copies all of them in one call, in as many
threads as torch uses; torch's own way is a call for each, in one thread where they are small.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from bagua_core.kernels.errors import KernelUnavailableError
from bagua_core.kernels.repeated_flatten import RepeatedFlatten


class Gathered:
    """flat: [elements], to be written to. views: of it, one for each gradient, of its shape and memory order."""

    def __init__(self, flat: Tensor, views: Sequence[Tensor]) -> None:
        self._flat = flat
        self._views = list(views)
        self._at_once = _at_once(flat, views)
        self._last: tuple[list[Tensor], int] | None = None  # the gradients, and the copy's version

    def gather(self, gradients: list[Tensor]) -> Tensor:
        """gradients: of the views' shapes and dtype."""
        if self._at_once is not None and _are_plain(gradients):
            self._at_once(gradients)
        else:
            torch._foreach_copy_(self._views, gradients)
        self._last = gradients, self._flat._version
        return self._flat

    def give_back(self, are_written: bool) -> None:
        """The step is over: gradients get what it wrote to their copies, and are let go. are_written: it wrote, in a
        way that tensors do not notice."""
        if self._last is not None:
            gradients, version = self._last
            if are_written or self._flat._version != version:
                torch._foreach_copy_(gradients, self._views)
        self._last = None


def _are_plain(tensors: list[Tensor]) -> bool:
    """Whether each is nothing but memory in the usual order; a subclass may have none."""
    return set(map(type, tensors)) == {Tensor} and all(map(Tensor.is_contiguous, tensors))


def _at_once(flat: Tensor, views: Sequence[Tensor]) -> RepeatedFlatten | None:
    if flat.device.type != "cpu" or not all(map(Tensor.is_contiguous, views)):
        return None
    try:
        return RepeatedFlatten(flat, [view.numel() for view in views])
    except KernelUnavailableError:
        return None  # torch's own way will do
