"""How is a chunk compressed, and what is remembered of what got lost by it?

Owns the two compressions and the errors of the one-bit form. Knows no communicator. Invariant: errors are those of the
last final step; a step under way works on copies, which `reduced` takes over and `failed` drops.

The one-bit form loses much in each step and nothing in the long run: each rank adds what it could not send of a bucket
to its next contribution (its own error), and the owner of a chunk does so with the sum (the owner's error). When chunks
change hands, in another generation, the owner's error becomes a part of its own error, at the chunk's place.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch

from bagua_core import kernels
from bagua_core.communication.chunks import Chunks
from bagua_core.kernels.formats import minmax_payload_at, one_bit_payload_at


class Coder(ABC):
    """Compresses one bucket of one step. Values: [chunks, chunks.size]; compressed: uint8, [chunks, size_bytes]."""

    @abstractmethod
    def compress(self, owners: slice, rows: torch.Tensor, out: torch.Tensor) -> None:
        """This rank's contributions to the chunks of `owners`. out: compressed."""

    @abstractmethod
    def reduce(self, received: torch.Tensor, out: torch.Tensor) -> None:
        """out: [size_bytes], the compressed sum of what all ranks contributed to this rank's chunk."""


class Compression(ABC):
    """Of all buckets of an operation. `reduced` is called while no job of the step runs; after `failed` jobs of the
    failed step may still run for a while, with their own Step."""

    def __init__(self) -> None:
        self.step = Step()

    @abstractmethod
    def size_bytes(self, count: int) -> int: ...

    @abstractmethod
    def coder(self, step: Step, number: int, chunks: Chunks, owner: int, device: torch.device) -> Coder:
        """For bucket `number` in `step` by this rank, whose chunk is `owner`'s."""

    @abstractmethod
    def decompress(
        self, compressed: torch.Tensor, rows: torch.Tensor, scale: float = 1.0, add: bool = False
    ) -> None:
        """rows = scale * x, or rows + scale * x with `add`. compressed: [chunks, size_bytes] or [size_bytes]; rows:
        values, [chunks, count] or [count]."""

    @abstractmethod
    def holds_nan(self, compressed: torch.Tensor, count: int) -> bool:
        """Whether anything decompresses to NaN. compressed: [chunks, size_bytes or more], each of `count` values."""

    def unsent(self, step: Step, number: int, elements: int) -> torch.Tensor | None:
        """[elements], fp32: what this rank has not sent of bucket `number`. It will not be asked for again once
        the step is final."""
        return None

    def reduced(self) -> None:
        """The step is final."""
        self.step = Step()

    def failed(self) -> None:
        """The step did not happen."""
        self.step = Step()


class Step:
    """What the jobs of one step leave behind; abandoned with it."""

    def __init__(self) -> None:
        self.errors: dict[int, _Errors | None] = {}


class MinMax(Compression):
    """Eight bits a value, by the range of its block; nothing is remembered."""

    def size_bytes(self, count: int) -> int:
        return kernels.minmax_bytes(count)

    def coder(self, step: Step, number: int, chunks: Chunks, owner: int, device: torch.device) -> Coder:
        return _MinMaxCoder(chunks)

    def decompress(
        self, compressed: torch.Tensor, rows: torch.Tensor, scale: float = 1.0, add: bool = False
    ) -> None:
        kernels.minmax_decompress(compressed, rows, scale=scale, add=add)

    def holds_nan(self, compressed: torch.Tensor, count: int) -> bool:
        return _holds_nan(compressed[:, : minmax_payload_at(count)])


class _MinMaxCoder(Coder):
    def __init__(self, chunks: Chunks) -> None:
        self._chunks = chunks

    def compress(self, owners: slice, rows: torch.Tensor, out: torch.Tensor) -> None:
        kernels.minmax_compress(rows, out)

    def reduce(self, received: torch.Tensor, out: torch.Tensor) -> None:
        kernels.minmax_reduce(received, self._chunks.size, out)


class OneBit(Compression):
    """One bit a value, with error feedback. Costs two copies of the values in fp32: a step that fails is done again
    with the errors that it began with."""

    def __init__(self) -> None:
        super().__init__()
        self._kept: dict[int, _Errors] = {}
        self._spare: dict[int, _Errors] = {}

    def size_bytes(self, count: int) -> int:
        return kernels.one_bit_bytes(count)

    def coder(self, step: Step, number: int, chunks: Chunks, owner: int, device: torch.device) -> Coder:
        errors = self._spare.pop(number, None)
        if errors is None or not errors.are_of(chunks, owner):
            errors = _Errors(chunks, owner, device)
        before = self._kept.get(number)
        if before is None or not before.are_of(chunks, owner):
            errors.take_over(before)
            before = errors
        step.errors[number] = errors
        return _OneBitCoder(before, errors)

    def decompress(
        self, compressed: torch.Tensor, rows: torch.Tensor, scale: float = 1.0, add: bool = False
    ) -> None:
        kernels.one_bit_decompress(compressed, rows, scale=scale, add=add)

    def holds_nan(self, compressed: torch.Tensor, count: int) -> bool:
        return _holds_nan(compressed[:, : one_bit_payload_at(count)])

    def unsent(self, step: Step, number: int, elements: int) -> torch.Tensor | None:
        kept = self._kept.get(number)
        step.errors[number] = None
        return None if kept is None else kept.in_place(elements)

    def reduced(self) -> None:
        for number, errors in self.step.errors.items():
            before = self._kept.pop(number, None)
            if errors is not None:
                self._kept[number] = errors
                if before is not None:
                    self._spare[number] = before
        super().reduced()


class _Errors:
    """worker: [owners * size], what this rank did not send, chunk after chunk. owned: [size], what the sum of its own
    chunk lost. Both fp32; zero at first."""

    def __init__(self, chunks: Chunks, owner: int, device: torch.device) -> None:
        self.chunks = chunks
        self.owner = owner
        self.worker = torch.zeros(chunks.owners * chunks.size, dtype=torch.float32, device=device)
        self.owned = torch.zeros(chunks.size, dtype=torch.float32, device=device)

    def are_of(self, chunks: Chunks, owner: int) -> bool:
        return (self.chunks, self.owner) == (chunks, owner)

    def take_over(self, kept: _Errors | None) -> None:
        """The values of `kept`, whose chunks had other owners."""
        self.worker.zero_()
        self.owned.zero_()
        if kept is not None:
            elements = self.chunks.elements
            self.worker[:elements] = kept.in_place(elements)

    def in_place(self, elements: int) -> torch.Tensor:
        """[elements]: both errors, each value where it belongs in the bucket."""
        whole = self.worker[:elements].clone()
        region = self.chunks.region(self.owner)
        whole[region] += self.owned[: region.stop - region.start]
        return whole


class _OneBitCoder(Coder):
    """before: read; after: written; the same if nothing is to be kept for another try."""

    def __init__(self, before: _Errors, after: _Errors) -> None:
        self._before = before
        self._after = after

    def compress(self, owners: slice, rows: torch.Tensor, out: torch.Tensor) -> None:
        before, after = (e.worker.view(e.chunks.owners, e.chunks.size) for e in (self._before, self._after))
        kernels.one_bit_compress(rows, before[owners], out, left=after[owners])

    def reduce(self, received: torch.Tensor, out: torch.Tensor) -> None:
        sums = torch.empty_like(self._after.owned)
        kernels.one_bit_reduce_values(received, sums)
        kernels.one_bit_compress(sums, self._before.owned, out, left=self._after.owned)


def _holds_nan(headers: torch.Tensor) -> bool:
    """headers: fp32 as bytes. A block that could not be represented has NaN in its first one."""
    return bool(headers.contiguous().view(torch.float32).isnan().any())
