"""Runs the kernels on CUDA tensors: chooses the kernel of cuda.cu, the number of thread blocks, and the arguments.

Knows nothing of CuPy: a launcher starts kernels by name (the tests have one that emulates a GPU's threads on the CPU).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from bagua_core.kernels.formats import blocks_in
from bagua_core.kernels.interface import RAW, VALUE_DTYPES, Code

SOURCE = Path(__file__).with_name("cuda.cu")
HEADER = SOURCE.with_name("arithmetic.h")
THREADS = 256  # THREADS of cuda.cu
PASS = 1024  # PASS of cuda.cu: elements that a thread block takes at a time
PASSES = (1, 2, 4, 8)  # what cuda.cu is compiled for, when first needed
PASSES_OF_ELEMENTS = 4  # for kernels without blocks of values; bagua_adam_steps takes blocks of as many

# As on the CPU: no contraction, no flushing, true division. NVRTC's own defaults would differ in the first.
COMPILE_FLAGS = (
    "--std=c++17",
    "--fmad=false",
    "--ftz=false",
    "--prec-div=true",
    "--prec-sqrt=true",
    f"-I{SOURCE.parent}",
)
KERNEL_NAMES = (
    "bagua_minmax_compress",
    "bagua_minmax_reduce",
    "bagua_one_bit_compress",
    "bagua_decode",
    "bagua_weighted_average",
    "bagua_add_difference",
    "bagua_adam_steps",
    "bagua_adam_gradients",
    "bagua_adam_update",
    "bagua_copy_parts",
)


def compile_flags(passes: int) -> tuple[str, ...]:
    return (*COMPILE_FLAGS, f"-DBAGUA_PASSES={passes}")


def passes_for(block_size: int) -> int:
    """Returns the fewest passes in which a thread block takes a whole block of values."""
    return next(p for p in PASSES if block_size <= p * PASS)


class Launcher(Protocol):
    """Starts kernels by name. arguments: NumPy scalars, of the kernel's very types; addresses are uint64."""

    def launch(
        self, device: torch.device, name: str, passes: int, thread_blocks: int, arguments: Sequence[Any]
    ) -> None:
        """Starts `name`, compiled for `passes`, on the current stream of `device`, with THREADS threads a block."""

    def table(self, numbers: Sequence[int], device: torch.device) -> Tensor:
        """Returns the numbers as int64 on `device`; kernels of the current stream may read them."""


class GpuKernels:
    """Starts the kernels of cuda.cu; see Kernels in interface.py.

    Everything runs on the current stream of the tensors' device.
    """

    def __init__(self, launcher: Launcher) -> None:
        self._launcher = launcher

    def _launch_blocks(
        self, tensor: Tensor, name: str, rows: int, count: int, block_size: int, *arguments: Any
    ) -> None:
        thread_blocks = rows * blocks_in(count, block_size)
        self._launcher.launch(tensor.device, name, passes_for(block_size), thread_blocks, arguments)

    def _launch_elements(self, tensor: Tensor, name: str, count: int, *arguments: Any) -> None:
        thread_blocks = -(-count // (PASSES_OF_ELEMENTS * PASS))
        self._launcher.launch(tensor.device, name, PASSES_OF_ELEMENTS, thread_blocks, arguments)

    def minmax_compress(self, values: Tensor, out: Tensor, block_size: int) -> None:
        rows, count = values.shape
        self._launch_blocks(
            values,
            "bagua_minmax_compress",
            rows,
            count,
            block_size,
            _address(values),
            _dtype(values),
            _long(count),
            _long(block_size),
            _address(out),
            _long(out.stride(0)),
        )

    def minmax_reduce(
        self, compressed: Tensor, count: int, out: Tensor, scale: float, block_size: int
    ) -> None:
        self._launch_blocks(
            compressed,
            "bagua_minmax_reduce",
            1,
            count,
            block_size,
            _address(compressed),
            _long(compressed.stride(0)),
            _long(compressed.shape[0]),
            _long(count),
            _long(block_size),
            np.float32(scale),
            _address(out),
        )

    def one_bit_compress(
        self, values: Tensor, error: Tensor, left: Tensor, out: Tensor, block_size: int
    ) -> None:
        rows, count = values.shape
        self._launch_blocks(
            values,
            "bagua_one_bit_compress",
            rows,
            count,
            block_size,
            _address(values),
            _dtype(values),
            _long(count),
            _long(block_size),
            _address(error),
            _address(left),
            _address(out),
            _long(out.stride(0)),
        )

    def decompress(
        self, code: Code, compressed: Tensor, out: Tensor, scale: float, add: bool, block_size: int
    ) -> None:
        rows, count = out.shape
        self._decode(code, compressed, rows, 1, count, out, scale, add, block_size)

    def reduce_values(
        self, code: Code, compressed: Tensor, out: Tensor, scale: float, block_size: int
    ) -> None:
        peers = compressed.shape[0]
        self._decode(code, compressed, 1, peers, out.numel(), out, scale, False, block_size)

    def _decode(
        self,
        code: Code,
        compressed: Tensor,
        rows: int,
        peers: int,
        count: int,
        out: Tensor,
        scale: float,
        add: bool,
        block_size: int,
    ) -> None:
        self._launch_blocks(
            out,
            "bagua_decode",
            rows,
            count,
            block_size,
            np.int32(code.value),
            _address(compressed),
            _long(compressed.stride(0)),
            _long(peers),
            _long(count),
            _long(block_size),
            np.float32(scale),
            np.int32(add),
            _address(out),
            _dtype(out),
        )

    def copy_parts(self, flat: Tensor, parts: Sequence[Tensor], into_flat: bool) -> None:
        dtype = parts[0].dtype
        same = dtype == flat.dtype
        pieces = dtype.itemsize // 8 if same and dtype.itemsize > 8 else 1  # complex128 is two of 8 bytes
        starts = accumulate((p.numel() * pieces for p in parts), initial=0)
        table = self._launcher.table([*(p.data_ptr() for p in parts), *starts], flat.device)
        self._launch_elements(
            flat,
            "bagua_copy_parts",
            flat.numel() * pieces,
            _address(table),
            _long(len(parts)),
            np.int32(RAW if same else VALUE_DTYPES[dtype]),
            _address(flat),
            np.int32(RAW if same else VALUE_DTYPES[flat.dtype]),
            np.int32(min(dtype.itemsize, 8) if same else 0),
            np.int32(into_flat),
        )

    def weighted_average(self, x: Tensor, y: Tensor, x_weight: float, y_weight: float) -> None:
        self._launch_elements(
            x,
            "bagua_weighted_average",
            x.numel(),
            _address(x),
            _dtype(x),
            _address(y),
            _dtype(y),
            _long(x.numel()),
            np.float32(x_weight),
            np.float32(y_weight),
        )

    def add_difference(self, x: Tensor, newer: Tensor, older: Tensor, scale: float) -> None:
        self._launch_elements(
            x,
            "bagua_add_difference",
            x.numel(),
            _address(x),
            _dtype(x),
            _address(newer),
            _address(older),
            _dtype(newer),
            _long(x.numel()),
            np.float32(scale),
        )

    def adam_steps(
        self,
        values: Tensor,
        second: Tensor,
        before: Tensor | None,
        after: Tensor | None,
        eps: float,
        reach: float,
        decay: float,
    ) -> None:
        self._launch_elements(
            values,
            "bagua_adam_steps",
            values.numel(),
            _address(values),
            _dtype(values),
            _address(second),
            _address(before),
            _address(after),
            _long(values.numel()),
            np.float32(eps),
            np.float32(reach),
            np.float32(decay),
        )

    def adam_gradients(self, values: Tensor, second: Tensor, eps: float) -> None:
        self._launch_elements(
            values,
            "bagua_adam_gradients",
            values.numel(),
            _address(values),
            _dtype(values),
            _address(second),
            _long(values.numel()),
            np.float32(eps),
        )

    def adam_update(
        self,
        parameter: Tensor,
        gradient: Tensor,
        first: Tensor,
        second: Tensor,
        share: float,
        weight_decay: float,
        eps: float,
        rate: float,
    ) -> None:
        self._launch_elements(
            parameter,
            "bagua_adam_update",
            parameter.numel(),
            _address(parameter),
            _dtype(parameter),
            _address(gradient),
            _address(first),
            _address(second),
            _long(parameter.numel()),
            np.float32(share),
            np.float32(weight_decay),
            np.float32(eps),
            np.float32(rate),
        )


def _address(tensor: Tensor | None) -> np.uint64:
    return np.uint64(0 if tensor is None else tensor.data_ptr())


def _dtype(tensor: Tensor) -> np.int32:
    return np.int32(VALUE_DTYPES[tensor.dtype])


def _long(number: int) -> np.int64:
    return np.int64(number)
