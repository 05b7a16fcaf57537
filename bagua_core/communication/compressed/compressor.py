"""Makes a compression of three methods in torch's operators, by name or as an object, with or without error feedback.

A compressor is registered by `register` in a script, or as an entry of `COMPRESSORS`. The built-in formats have kernels
(compression.py).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import ClassVar

import torch

from bagua_core.communication.compressed.chunks import Chunks
from bagua_core.communication.compressed.compression import (
    Coder,
    Compression,
    MinMax,
    MinMaxWithFeedback,
    OneBit,
    StepErrors,
    WithFeedback,
)
from bagua_core.errors import UserError


class Compressor(ABC):
    """A compression in three methods. It is deterministic: every rank decompresses the same bytes to the same bits.
    Values that can't be represented decompress to NaN."""

    name: ClassVar[str]
    """Part of the fingerprint, with `arguments`."""

    arguments: str = ""

    @abstractmethod
    def size_bytes(self, count: int) -> int:
        """Returns the size of `count` values, compressed."""

    @abstractmethod
    def compress(self, values: torch.Tensor, out: torch.Tensor) -> None:
        """Compresses `values` into `out`. values: [rows, count], floats of any dtype; out: uint8, [rows,
        size_bytes(count)]."""

    @abstractmethod
    def decompress(self, compressed: torch.Tensor, count: int) -> torch.Tensor:
        """Returns the values: fp32, [rows, count]. compressed: uint8, contiguous, [rows, size_bytes(count)]."""


class UnknownCompressorError(UserError, ValueError):
    """No compressor has this name, or none in this form."""


Maker = Callable[[], Compressor]


def _minmax_int4() -> Compressor:
    from bagua_core.communication.compressed.minmax_int4 import MinMaxInt4  # late: it imports this module

    return MinMaxInt4()


COMPRESSORS: dict[str, Maker] = {"minmax_int4": _minmax_int4}
_WITH_KERNELS: dict[tuple[str, bool], Callable[[], Compression]] = {
    ("minmax_uint8", False): MinMax,
    ("minmax_uint8", True): MinMaxWithFeedback,
    ("one_bit", True): OneBit,
}


def register(name: str, make: Maker) -> None:
    """Registers a compressor by `name`; every worker must do so alike.

    make: returns a new compressor; its class, if that takes no arguments.
    Raises ValueError if the name is taken.
    """
    if name in COMPRESSORS or name in {known for known, _ in _WITH_KERNELS}:
        raise ValueError(f"there is a compressor {name!r} already; choose another name")
    COMPRESSORS[name] = make


def described(compressor: str | Compressor) -> str:
    return compressor if isinstance(compressor, str) else compressor.name + compressor.arguments


def make(compressor: str | Compressor, feedback: bool) -> Compression:
    """Returns a new compression for one model. Raises UnknownCompressorError."""
    if isinstance(compressor, Compressor):
        return _WithFeedback(compressor) if feedback else _Plain(compressor)
    if compressor in COMPRESSORS:
        return make(COMPRESSORS[compressor](), feedback)
    known = _WITH_KERNELS.get((compressor, feedback))
    if known is None:
        forms = sorted({*COMPRESSORS, *(name for name, with_it in _WITH_KERNELS if with_it == feedback)})
        raise UnknownCompressorError(
            f"compressor={compressor!r} with feedback={feedback} is unknown; use one of {', '.join(forms)}"
        )
    return known()


def with_feedback(compressor: str | Compressor) -> WithFeedback:
    """Returns `make`'s compression with feedback, for a caller that keeps the errors itself. Raises
    UnknownCompressorError."""
    form = make(compressor, feedback=True)
    assert isinstance(form, WithFeedback)
    return form


def _row_values(compressor: Compressor, compressed: torch.Tensor, count: int) -> torch.Tensor:
    """Returns the decompressed rows: [rows, count]. It copies the bytes, since those of a message may begin
    anywhere."""
    rows = compressed.reshape(-1, compressed.shape[-1])[:, : compressor.size_bytes(count)]
    return compressor.decompress(rows.clone(memory_format=torch.contiguous_format), count)


def _put(
    compressor: Compressor, compressed: torch.Tensor, rows: torch.Tensor, scale: float, add: bool
) -> None:
    values = _row_values(compressor, compressed, rows.shape[-1]).mul_(scale).view(rows.shape)
    if add:
        rows.add_(values)
    else:
        rows.copy_(values)


def _holds_nan(compressor: Compressor, compressed: torch.Tensor, count: int) -> torch.Tensor:
    return _row_values(compressor, compressed, count).isnan().any()


class _Plain(Compression):
    """A compression by a compressor without feedback; nothing is remembered."""

    def __init__(self, compressor: Compressor) -> None:
        super().__init__()
        self.compressor = compressor

    def size_bytes(self, count: int) -> int:
        return self.compressor.size_bytes(count)

    def coder(self, step: StepErrors, number: int, chunks: Chunks, owner: int, device: torch.device) -> Coder:
        return _PlainCoder(self.compressor, chunks)

    def decompress(
        self, compressed: torch.Tensor, rows: torch.Tensor, scale: float = 1.0, add: bool = False
    ) -> None:
        _put(self.compressor, compressed, rows, scale, add)

    def headers(self, compressed: torch.Tensor, count: int) -> torch.Tensor:
        return compressed[:, :0]

    def nan_flag(self, compressed: torch.Tensor, count: int) -> torch.Tensor:
        return _holds_nan(self.compressor, compressed, count)


class _PlainCoder(Coder):
    def __init__(self, compressor: Compressor, chunks: Chunks) -> None:
        self._compressor, self._chunks = compressor, chunks

    def compress(self, owners: slice, rows: torch.Tensor, out: torch.Tensor) -> None:
        self._compressor.compress(rows, out)

    def reduce(self, received: torch.Tensor, out: torch.Tensor) -> None:
        sums = _row_values(self._compressor, received, self._chunks.size).sum(0, keepdim=True)
        self._compressor.compress(sums, out.unsqueeze(0))


class _WithFeedback(WithFeedback):
    def __init__(self, compressor: Compressor) -> None:
        super().__init__()
        self.compressor = compressor

    def size_bytes(self, count: int) -> int:
        return self.compressor.size_bytes(count)

    def encode(self, rows: torch.Tensor, before: torch.Tensor, left: torch.Tensor, out: torch.Tensor) -> None:
        torch.add(rows, before, out=left)
        flat, count = left.view(-1, left.shape[-1]), left.shape[-1]
        self.compressor.compress(flat, out.view(-1, out.shape[-1]))
        flat.sub_(_row_values(self.compressor, out, count)).nan_to_num_(0.0, 0.0, 0.0)

    def sum_of(self, received: torch.Tensor, out: torch.Tensor) -> None:
        out.zero_()
        for row in received:
            out.add_(_row_values(self.compressor, row, out.shape[-1]).view(out.shape))

    def decompress(
        self, compressed: torch.Tensor, rows: torch.Tensor, scale: float = 1.0, add: bool = False
    ) -> None:
        _put(self.compressor, compressed, rows, scale, add)

    def headers(self, compressed: torch.Tensor, count: int) -> torch.Tensor:
        return compressed[:, :0]

    def nan_flag(self, compressed: torch.Tensor, count: int) -> torch.Tensor:
        return _holds_nan(self.compressor, compressed, count)
