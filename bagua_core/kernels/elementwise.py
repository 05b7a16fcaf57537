"""Builds elementwise programs for the CPU's library. See elementwise.h.

A program is a list of operations on registers: first the memories that it is given, then temporaries of its own. It
runs over all parts, tile by tile, so that what its operations make of an element stays in the cache. fp32 only.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from pathlib import Path

import torch

from bagua_core.kernels.cpu_library import address_of
from bagua_core.kernels.errors import KernelUnavailableError
from bagua_core.kernels.targets import compiled_library

# VML_HA | VML_FTZDAZ_OFF | VML_ERRMODE_IGNORE of MKL's reference, with which torch calls it (ATen/cpu/vml.h).
_MKL_MODE = 0x2 | 0x140000 | 0x100


@dataclass(frozen=True, slots=True)
class Step:
    """operation: a name from elementwise.h. to, x, y, z: registers. number: its place among those of a run."""

    operation: str
    to: int
    x: int = 0
    y: int = 0
    z: int = 0
    number: int = 0


class Program:
    """memories: how many registers are memories. Raises KernelUnavailableError where it cannot run here."""

    def __init__(self, steps: Sequence[Step], memories: int, temporaries: int) -> None:
        self._library = compiled_library()
        self._memories = memories
        self._temporaries = temporaries
        self._count = len(steps)
        if self._library.bagua_elementwise_limits(memories, temporaries) != 0:
            raise KernelUnavailableError(
                f"a program of {memories} memories and {temporaries} temporaries is too large for the library"
            )
        words = chain.from_iterable(
            (self._number_of(s.operation), s.to, s.x, s.y, s.z, s.number) for s in steps
        )
        self._words = array("i", words)
        self._tile = self._library.bagua_elementwise_tile()

    def _number_of(self, operation: str) -> int:
        found: int = self._library.bagua_elementwise_operation(operation.encode())
        if found < 0:
            raise KernelUnavailableError(f"the library has no operation {operation!r}")
        return found

    def run(self, parts: Sequence[Sequence[torch.Tensor]], numbers: Sequence[float]) -> None:
        """parts: [parts][memories], contiguous fp32 on the CPU, those of a part of equal numbers of elements and each
        beginning where no other of them lies. numbers: rounded to fp32. Threads: torch.get_num_threads()."""
        elements = array("q", [part[0].numel() for part in parts])
        first_tiles = array("q", accumulate((-(-count // self._tile) for count in elements), initial=0))
        pointers = array("Q", [memory.data_ptr() for part in parts for memory in part])
        rounded = array("f", numbers or (0.0,))
        self._library.bagua_elementwise(
            address_of(self._words),
            self._count,
            address_of(rounded),
            self._memories,
            self._temporaries,
            address_of(pointers),
            address_of(elements),
            address_of(first_tiles),
            len(parts),
            torch.get_num_threads(),
        )


def use_torchs_sqrt() -> bool:
    """Let the operation given_sqrt take roots with the function that torch's x86 builds take them with, MKL's. Returns
    whether torch holds it. Raises KernelUnavailableError."""
    library = compiled_library()
    try:
        torchs = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
        functions = [
            ctypes.cast(f, ctypes.c_void_p) for f in (torchs.vmsSqrt, torchs.MKL_Set_Num_Threads_Local)
        ]
    except (OSError, AttributeError):
        return False  # another build
    library.bagua_elementwise_sqrt(functions[0], _MKL_MODE, functions[1])
    return True
