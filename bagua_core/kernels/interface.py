"""Defines the interface of a target: the kernels behind the public functions, on arguments already checked.

Shapes: values, errors [rows, count]; compressed [rows or peers, bytes]; `flat` and the operands of averages [count].
All contiguous, on one device, with at least one element. dtypes: float32, float16, bfloat16; errors float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Protocol

import torch
from torch import Tensor

VALUE_DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}  # numbers of cpu.c and cuda.cu
RAW = 3  # bytes, whatever they mean


class Code(Enum):
    """A compressed form."""

    MINMAX = 0
    ONE_BIT = 1


class Kernels(Protocol):
    def minmax_compress(self, values: Tensor, out: Tensor, block_size: int) -> None: ...

    def minmax_reduce(
        self, compressed: Tensor, count: int, out: Tensor, scale: float, block_size: int
    ) -> None:
        """Writes the compressed form of scale * (sum over the rows) to `out`, [bytes]."""

    def one_bit_compress(
        self, values: Tensor, error: Tensor, left: Tensor, out: Tensor, block_size: int
    ) -> None:
        """Compresses values + error to `out`, each row by itself, and writes the new error to `left`, maybe `error`
        itself."""

    def decompress(
        self, code: Code, compressed: Tensor, out: Tensor, scale: float, add: bool, block_size: int
    ) -> None:
        """Decodes each row by itself to `out`, [rows, count]."""

    def reduce_values(
        self, code: Code, compressed: Tensor, out: Tensor, scale: float, block_size: int
    ) -> None:
        """Decodes all rows and writes their sum to `out`, [count]."""

    def copy_parts(self, flat: Tensor, parts: Sequence[Tensor], into_flat: bool) -> None:
        """Copies the parts to `flat`, or back; they are of one dtype, none empty. A dtype that is not one of values is
        copied to the same dtype only."""

    def weighted_average(self, x: Tensor, y: Tensor, x_weight: float, y_weight: float) -> None: ...

    def add_difference(self, x: Tensor, newer: Tensor, older: Tensor, scale: float) -> None:
        """Adds scale * (newer - older) to x; newer and older have one dtype."""

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
        """Does what adam.adam_steps does. All are [count]; second has the dtype of values, before and after are
        float32, both there or neither."""

    def adam_gradients(self, values: Tensor, second: Tensor, eps: float) -> None:
        """Does what adam.adam_gradients does. Both are [count], of one dtype."""

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
        """Does what adam.adam_update does. All are [count], of one dtype."""
