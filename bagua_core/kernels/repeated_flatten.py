"""Flattens new tensors of the same sizes again and again, on the CPU, by the compiled library.

What stays the same from call to call is worked out once, and nothing is checked: a call for two hundred tensors costs
what a look at each of them does.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from bagua_core.kernels.cpu_library import address_of
from bagua_core.kernels.interface import RAW
from bagua_core.kernels.targets import compiled_library


class RepeatedFlatten:
    """Copies tensors of the same sizes to one flat buffer at each call.

    out: [sum of counts] on the CPU, contiguous. counts: elements of each tensor. Raises KernelUnavailableError where
    there is no compiled library.
    """

    def __init__(self, out: Tensor, counts: Sequence[int]) -> None:
        self._copy = compiled_library().bagua_copy_parts
        self._out = out
        self._parts = [place for place, count in enumerate(counts) if count]
        self._all = len(self._parts) == len(counts)
        width = out.element_size()
        self._starts = array("q", accumulate((count * width for count in counts if count), initial=0))

    def __call__(self, tensors: Sequence[Tensor]) -> None:
        """Copies `tensors` to `out`. They are contiguous, on the CPU, of the dtype of `out` and of the given counts.
        Unchecked."""
        pointers = array("Q", map(Tensor.data_ptr, tensors))
        if not self._all:
            pointers = array("Q", [pointers[place] for place in self._parts])
        self._copy(
            len(pointers),
            address_of(pointers),
            address_of(self._starts),
            RAW,
            self._out.data_ptr(),
            RAW,
            True,
            torch.get_num_threads(),
        )
