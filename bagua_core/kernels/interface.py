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
        """out: [bytes]."""

    def one_bit_compress(
        self, values: Tensor, error: Tensor, left: Tensor, out: Tensor, block_size: int
    ) -> None:
        """left: the new error; may be `error` itself."""

    def decompress(
        self, code: Code, compressed: Tensor, out: Tensor, scale: float, add: bool, block_size: int
    ) -> None:
        """Each row by itself; out: [rows, count]."""

    def reduce_values(
        self, code: Code, compressed: Tensor, out: Tensor, scale: float, block_size: int
    ) -> None:
        """out: [count]."""

    def copy_parts(self, flat: Tensor, parts: Sequence[Tensor], into_flat: bool) -> None:
        """Parts of one dtype, none empty. Other dtypes than those of values: only equal ones."""

    def weighted_average(self, x: Tensor, y: Tensor, x_weight: float, y_weight: float) -> None: ...

    def add_difference(self, x: Tensor, newer: Tensor, older: Tensor, scale: float) -> None:
        """newer and older have one dtype."""

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
        """All [count]; second has the dtype of values, before and after are float32, both there or neither."""

    def adam_gradients(self, values: Tensor, second: Tensor, eps: float) -> None:
        """Both [count], of one dtype."""

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
        """All [count], of one dtype."""
