"""Runs the kernels on CPU tensors, by the compiled library. Owns the calls' arguments; results are written by cpu.c."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from bagua_core.kernels.cpu_library import address_of
from bagua_core.kernels.interface import RAW, VALUE_DTYPES, Code

INSTRUCTION_SETS = ("baseline", "avx2")


class CpuKernels:
    """Calls the compiled library's kernels; see Kernels in interface.py.

    Threads: torch.get_num_threads() at the time of the call, less for little work.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library

    def use_instruction_set(self, name: str | None = None) -> str:
        """Selects `name`, or the best of this processor for None or where it lacks `name`; returns what is used."""
        wanted = -1 if name is None else INSTRUCTION_SETS.index(name)
        return INSTRUCTION_SETS[self._library.bagua_use_instruction_set(wanted)]

    def sizes(self, count: int, block_size: int) -> tuple[int, int]:
        """Returns the sizes, in bytes, of both compressed forms as the header has them; formats.py must agree."""
        library = self._library
        return library.bagua_minmax_bytes(count, block_size), library.bagua_one_bit_bytes(count, block_size)

    def minmax_compress(self, values: Tensor, out: Tensor, block_size: int) -> None:
        rows, count = values.shape
        self._library.bagua_minmax_compress(
            values.data_ptr(),
            VALUE_DTYPES[values.dtype],
            rows,
            count,
            block_size,
            out.data_ptr(),
            out.stride(0),
            torch.get_num_threads(),
        )

    def minmax_reduce(
        self, compressed: Tensor, count: int, out: Tensor, scale: float, block_size: int
    ) -> None:
        self._library.bagua_minmax_reduce(
            compressed.data_ptr(),
            compressed.stride(0),
            compressed.shape[0],
            count,
            block_size,
            scale,
            out.data_ptr(),
            torch.get_num_threads(),
        )

    def one_bit_compress(
        self, values: Tensor, error: Tensor, left: Tensor, out: Tensor, block_size: int
    ) -> None:
        rows, count = values.shape
        self._library.bagua_one_bit_compress(
            values.data_ptr(),
            VALUE_DTYPES[values.dtype],
            rows,
            count,
            block_size,
            error.data_ptr(),
            left.data_ptr(),
            out.data_ptr(),
            out.stride(0),
            torch.get_num_threads(),
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
        self._library.bagua_decode(
            code.value,
            compressed.data_ptr(),
            compressed.stride(0),
            rows,
            peers,
            count,
            block_size,
            scale,
            add,
            out.data_ptr(),
            VALUE_DTYPES[out.dtype],
            torch.get_num_threads(),
        )

    def copy_parts(self, flat: Tensor, parts: Sequence[Tensor], into_flat: bool) -> None:
        dtype = parts[0].dtype
        raw = dtype == flat.dtype
        unit = dtype.itemsize if raw else 1
        pointers = array("Q", map(Tensor.data_ptr, parts))
        starts = array("q", accumulate(map(Tensor.numel, parts), initial=0))
        if unit > 1:
            starts = array("q", [start * unit for start in starts])
        self._library.bagua_copy_parts(
            len(parts),
            address_of(pointers),
            address_of(starts),
            RAW if raw else VALUE_DTYPES[dtype],
            flat.data_ptr(),
            RAW if raw else VALUE_DTYPES[flat.dtype],
            into_flat,
            torch.get_num_threads(),
        )

    def weighted_average(self, x: Tensor, y: Tensor, x_weight: float, y_weight: float) -> None:
        self._library.bagua_weighted_average(
            x.data_ptr(),
            VALUE_DTYPES[x.dtype],
            y.data_ptr(),
            VALUE_DTYPES[y.dtype],
            x.numel(),
            x_weight,
            y_weight,
            torch.get_num_threads(),
        )

    def add_difference(self, x: Tensor, newer: Tensor, older: Tensor, scale: float) -> None:
        self._library.bagua_add_difference(
            x.data_ptr(),
            VALUE_DTYPES[x.dtype],
            newer.data_ptr(),
            older.data_ptr(),
            VALUE_DTYPES[newer.dtype],
            x.numel(),
            scale,
            torch.get_num_threads(),
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
        self._library.bagua_adam_steps(
            values.data_ptr(),
            VALUE_DTYPES[values.dtype],
            second.data_ptr(),
            None if before is None else before.data_ptr(),
            None if after is None else after.data_ptr(),
            values.numel(),
            eps,
            reach,
            decay,
            torch.get_num_threads(),
        )

    def adam_gradients(self, values: Tensor, second: Tensor, eps: float) -> None:
        self._library.bagua_adam_gradients(
            values.data_ptr(),
            VALUE_DTYPES[values.dtype],
            second.data_ptr(),
            values.numel(),
            eps,
            torch.get_num_threads(),
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
        self._library.bagua_adam_update(
            parameter.data_ptr(),
            VALUE_DTYPES[parameter.dtype],
            gradient.data_ptr(),
            first.data_ptr(),
            second.data_ptr(),
            parameter.numel(),
            share,
            weight_decay,
            eps,
            rate,
            torch.get_num_threads(),
        )
