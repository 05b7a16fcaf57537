"""Compresses chunks, in eight bits or one, with or without error feedback.

Owns the compressions and the errors. Knows no communicator. Invariant: errors are those of the last final step; a step
under way works on copies, which `reduced` takes over and `failed` drops.

With error feedback nothing is lost in the long run: each rank adds what it could not send of a bucket to its next
contribution (its own error), and the owner of a chunk does so with the sum (the owner's error). When chunks change
hands, in another generation, the owner's error becomes a part of its own error, at the chunk's place.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch

from bagua_core import kernels
from bagua_core.communication.compressed.chunks import Chunks
from bagua_core.kernels.formats import minmax_payload_at, one_bit_payload_at

# A value that is larger than what its sign represents comes later than the others, and keeps the error of its block
# large. Stretching delivers it sooner, at the price of more noise in the small ones; beyond 1.5 the noise wins.
STRETCH = 1.5


class Coder(ABC):
    """A coder that compresses one bucket of one step. Values: [chunks, chunks.size]; compressed: uint8, [chunks,
    size_bytes]."""

    @abstractmethod
    def compress(self, owners: slice, rows: torch.Tensor, out: torch.Tensor) -> None:
        """Compresses this rank's contributions to the chunks of `owners`. out: compressed."""

    @abstractmethod
    def reduce(self, received: torch.Tensor, out: torch.Tensor) -> None:
        """Writes the compressed sum of what all ranks contributed to this rank's chunk. out: [size_bytes]."""


class Compression(ABC):
    """The compression of all buckets of an operation. `reduced` is called while no job of the step runs; after `failed`
    jobs of the failed step may still run for a while, with their own Step."""

    def __init__(self) -> None:
        self.step = StepErrors()

    @abstractmethod
    def size_bytes(self, count: int) -> int: ...

    @abstractmethod
    def coder(self, step: StepErrors, number: int, chunks: Chunks, owner: int, device: torch.device) -> Coder:
        """Returns the coder of this rank for bucket `number` in `step`; this rank's chunk is `owner`'s."""

    @abstractmethod
    def decompress(
        self, compressed: torch.Tensor, rows: torch.Tensor, scale: float = 1.0, add: bool = False
    ) -> None:
        """Decompresses to rows = scale * x, or rows + scale * x with `add`. compressed: [chunks, size_bytes] or
        [size_bytes]; rows: values, [chunks, count] or [count]."""

    @abstractmethod
    def headers(self, compressed: torch.Tensor, count: int) -> torch.Tensor:
        """Returns the headers before the values: fp32 as bytes, [chunks, ...]. A block that could not be represented
        has NaN in its first one. compressed: [chunks, size_bytes or more], each of `count` values."""

    def nan_flag(self, compressed: torch.Tensor, count: int) -> torch.Tensor:
        """Returns whether anything decompresses to NaN, as a tensor without dimensions on the device. compressed: as
        for `headers`."""
        return self.headers(compressed, count).contiguous().view(torch.float32).isnan().any()

    def unsent(self, step: StepErrors, number: int, elements: int) -> torch.Tensor | None:
        """Returns what this rank has not sent of bucket `number`: [elements], fp32; None if there is nothing. It will
        not be asked for again once the step is final."""
        return None

    def reduced(self) -> None:
        """Begins a new Step: the step is final."""
        self.step = StepErrors()

    def failed(self) -> None:
        """Begins a new Step: the step did not happen."""
        self.step = StepErrors()


class StepErrors:
    """The results that the jobs of one step leave behind; abandoned with it."""

    def __init__(self) -> None:
        self.errors: dict[int, _Errors | None] = {}


class MinMax(Compression):
    """Compresses in eight bits a value, by the range of its block; nothing is remembered."""

    def size_bytes(self, count: int) -> int:
        return kernels.minmax_bytes(count)

    def coder(self, step: StepErrors, number: int, chunks: Chunks, owner: int, device: torch.device) -> Coder:
        return _MinMaxCoder(chunks)

    def decompress(
        self, compressed: torch.Tensor, rows: torch.Tensor, scale: float = 1.0, add: bool = False
    ) -> None:
        kernels.minmax_decompress(compressed, rows, scale=scale, add=add)

    def headers(self, compressed: torch.Tensor, count: int) -> torch.Tensor:
        return compressed[:, : minmax_payload_at(count)]


class _MinMaxCoder(Coder):
    def __init__(self, chunks: Chunks) -> None:
        self._chunks = chunks

    def compress(self, owners: slice, rows: torch.Tensor, out: torch.Tensor) -> None:
        kernels.minmax_compress(rows, out)

    def reduce(self, received: torch.Tensor, out: torch.Tensor) -> None:
        kernels.minmax_reduce(received, self._chunks.size, out)


class WithFeedback(Compression):
    """A form of compression with error feedback. Costs two copies of the values in fp32: a step that fails is done
    again with the errors that it began with."""

    def __init__(self) -> None:
        super().__init__()
        self._kept: dict[int, _Errors] = {}
        self._spare: dict[int, _Errors] = {}

    @abstractmethod
    def encode(self, rows: torch.Tensor, before: torch.Tensor, left: torch.Tensor, out: torch.Tensor) -> None:
        """Compresses rows + before into `out`. What is lost by it goes to `left`, which may be `before` and is finite,
        whatever `rows` are. before, left: fp32, of the shape of `rows`."""

    @abstractmethod
    def sum_of(self, received: torch.Tensor, out: torch.Tensor) -> None:
        """Writes the sum of all rows of `received`, added in fp32 in their order. out: fp32, [values]."""

    def coder(self, step: StepErrors, number: int, chunks: Chunks, owner: int, device: torch.device) -> Coder:
        errors = self._spare.pop(number, None)
        if errors is None or not errors.are_of(chunks, owner):
            errors = _Errors(chunks, owner, device)
        # what `unsent` has returned in this step was added to the values
        before = None if number in step.errors else self._kept.get(number)
        if before is None or not before.are_of(chunks, owner):
            errors.take_over(before)
            before = errors
        step.errors[number] = errors
        return _FeedbackCoder(self, before, errors)

    def unsent(self, step: StepErrors, number: int, elements: int) -> torch.Tensor | None:
        if number in step.errors:
            return None
        kept = self._kept.get(number)
        step.errors[number] = None
        return None if kept is None else kept.in_place(elements)

    def discard(self, number: int, elements: Sequence[slice]) -> None:
        """Takes back the errors of this step for these elements of bucket `number`, since their sum is not used: what
        the step delivered of the earlier errors reached no gradient. Called before `reduced`."""
        kept, errors = self._kept.get(number), self.step.errors.get(number)
        if (
            errors is None and kept is not None and number in self.step.errors
        ):  # `unsent` has returned the earlier ones
            errors = self.step.errors[number] = _Errors(kept.chunks, kept.owner, kept.worker.device)
        if errors is not None:
            errors.take_back(kept, elements)

    def forget(self) -> None:
        """Begins with errors of zero. Called between steps."""
        self._kept.clear()

    def reduced(self) -> None:
        # Errors count in the next reduction alone: a bucket that was reduced without compression has none from then on
        kept, self._kept = self._kept, {}
        for number, errors in self.step.errors.items():
            if errors is not None:
                self._kept[number] = errors
                if (before := kept.get(number)) is not None:
                    self._spare[number] = before
        super().reduced()


class OneBit(WithFeedback):
    """Compresses in one bit a value: its sign, with STRETCH times the mean magnitude of its block."""

    def size_bytes(self, count: int) -> int:
        return kernels.one_bit_bytes(count)

    def encode(self, rows: torch.Tensor, before: torch.Tensor, left: torch.Tensor, out: torch.Tensor) -> None:
        kernels.one_bit_compress(rows, before, out, left=left)
        kernels.one_bit_decompress(out, left, scale=1.0 - STRETCH, add=True)
        left.nan_to_num_(0.0, 0.0, 0.0)  # a block that can't be represented decodes to NaN
        headers = out[..., : one_bit_payload_at(rows.shape[-1])].view(torch.float32)
        headers.mul_(STRETCH)

    def sum_of(self, received: torch.Tensor, out: torch.Tensor) -> None:
        kernels.one_bit_reduce_values(received, out)

    def decompress(
        self, compressed: torch.Tensor, rows: torch.Tensor, scale: float = 1.0, add: bool = False
    ) -> None:
        kernels.one_bit_decompress(compressed, rows, scale=scale, add=add)

    def headers(self, compressed: torch.Tensor, count: int) -> torch.Tensor:
        return compressed[:, : one_bit_payload_at(count)]


class MinMaxWithFeedback(WithFeedback):
    """Compresses in the eight bits of MinMax, with error feedback."""

    def size_bytes(self, count: int) -> int:
        return kernels.minmax_bytes(count)

    def encode(self, rows: torch.Tensor, before: torch.Tensor, left: torch.Tensor, out: torch.Tensor) -> None:
        torch.add(rows, before, out=left)
        kernels.minmax_compress(left, out)
        kernels.minmax_decompress(out, left, scale=-1.0, add=True)
        left.nan_to_num_(0.0, 0.0, 0.0)  # a block that can't be represented decodes to NaN

    def sum_of(self, received: torch.Tensor, out: torch.Tensor) -> None:
        kernels.minmax_reduce_values(received, out)

    def decompress(
        self, compressed: torch.Tensor, rows: torch.Tensor, scale: float = 1.0, add: bool = False
    ) -> None:
        kernels.minmax_decompress(compressed, rows, scale=scale, add=add)

    def headers(self, compressed: torch.Tensor, count: int) -> torch.Tensor:
        return compressed[:, : minmax_payload_at(count)]


class _Errors:
    """The errors of one bucket. worker: [owners * size], what this rank did not send, chunk after chunk. owned: [size],
    what the sum of its own chunk lost. Both fp32; zero at first."""

    def __init__(self, chunks: Chunks, owner: int, device: torch.device) -> None:
        self.chunks = chunks
        self.owner = owner
        self.worker = torch.zeros(chunks.owners * chunks.size, dtype=torch.float32, device=device)
        self.owned = torch.zeros(chunks.size, dtype=torch.float32, device=device)

    def are_of(self, chunks: Chunks, owner: int) -> bool:
        return (self.chunks, self.owner) == (chunks, owner)

    def take_over(self, kept: _Errors | None) -> None:
        """Takes the values of `kept`, whose chunks had other owners; zero if it is None."""
        self.worker.zero_()
        self.owned.zero_()
        if kept is not None:
            elements = self.chunks.elements
            self.worker[:elements] = kept.in_place(elements)

    def take_back(self, kept: _Errors | None, elements: Sequence[slice]) -> None:
        """Gives these elements of the bucket the errors that `kept` has for them; zero if it is None."""
        region = self.chunks.region(self.owner)
        if kept is None:
            worker, owned = torch.zeros_like(self.worker), torch.zeros_like(self.owned)
        elif kept.are_of(self.chunks, self.owner):
            worker, owned = kept.worker, kept.owned
        else:
            worker, owned = kept.in_place(self.chunks.elements), torch.zeros_like(self.owned)
        for part in elements:
            own = slice(
                max(part.start, region.start) - region.start,
                max(min(part.stop, region.stop) - region.start, 0),
            )
            self.worker[part] = worker[part]
            self.owned[own] = owned[own]

    def in_place(self, elements: int) -> torch.Tensor:
        """Returns both errors, each value where it belongs in the bucket: [elements]."""
        whole = self.worker[:elements].clone()
        region = self.chunks.region(self.owner)
        whole[region] += self.owned[: region.stop - region.start]
        return whole


class _FeedbackCoder(Coder):
    """A coder with error feedback. before: read; after: written; the same if nothing is to be kept for another try."""

    def __init__(self, form: WithFeedback, before: _Errors, after: _Errors) -> None:
        self._form = form
        self._before = before
        self._after = after

    def compress(self, owners: slice, rows: torch.Tensor, out: torch.Tensor) -> None:
        before, after = (e.worker.view(e.chunks.owners, e.chunks.size) for e in (self._before, self._after))
        self._form.encode(rows, before[owners], after[owners], out)

    def reduce(self, received: torch.Tensor, out: torch.Tensor) -> None:
        sums = torch.empty_like(self._after.owned)
        self._form.sum_of(received, sums)
        self._form.encode(sums, self._before.owned, self._after.owned, out)
