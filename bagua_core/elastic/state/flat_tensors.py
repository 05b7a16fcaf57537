"""Shows tensors as one virtual run of bytes, any range of which can be read or written without a copy of the whole.

Invariant: every tensor starts at a multiple of ALIGNMENT_BYTES.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import overload

import torch

from bagua_core.elastic.state.flat_digest import digest_of_bytes

ALIGNMENT_BYTES = 64  # so that tensors can be views of the received bytes, whatever their dtype


def padded(size_bytes: int) -> int:
    return -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def strides_are_dense(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Tells whether the elements fill one run of memory, in any order of the dimensions."""
    expected = 1
    for stride, size in sorted(zip(strides, shape, strict=True)):
        if size == 0:
            return True
        if size > 1 and stride != expected:
            return False
        expected *= size
    return True


def is_dense(tensor: torch.Tensor) -> bool:
    return strides_are_dense(tensor.shape, tensor.stride())


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the memory of a dense tensor as uint8, not a copy."""
    count = tensor.numel()
    return torch.as_strided(tensor.detach(), (count,), (1,)).view(torch.uint8)


class FlatTensors(Sequence[torch.Tensor]):
    """A view of tensors as one run of bytes, each tensor padded to ALIGNMENT_BYTES. Holds no copy of them."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors = list(tensors)
        self._starts: list[int] = []
        at = 0
        for tensor in self._tensors:
            if not is_dense(tensor):
                raise ValueError(f"a tensor of shape {tuple(tensor.shape)} with gaps has no run of bytes")
            self._starts.append(at)
            at += padded(tensor.nbytes)
        self.size_bytes = at

    @overload
    def __getitem__(self, index: int) -> torch.Tensor: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[torch.Tensor]: ...
    def __getitem__(self, index: int | slice) -> torch.Tensor | Sequence[torch.Tensor]:
        return self._tensors[index]

    def __len__(self) -> int:
        return len(self._tensors)

    def pieces(self, begin: int, end: int) -> Iterator[tuple[int, torch.Tensor]]:
        """Yields (offset from begin, bytes of one tensor) for all that lies in [begin, end)."""
        for index, first, last in self.spans(begin, end):
            yield self._starts[index] + first - begin, bytes_of(self._tensors[index])[first:last]

    def spans(self, begin: int, end: int) -> Iterator[tuple[int, int, int]]:
        """Yields (index of a tensor, begin and end of its bytes) for all that lies in [begin, end)."""
        if not 0 <= begin <= end <= self.size_bytes:
            raise ValueError(f"bytes {begin}..{end} are not within 0..{self.size_bytes}")
        index = max(0, bisect_right(self._starts, begin) - 1)
        while index < len(self._tensors) and self._starts[index] < end:
            tensor, start = self._tensors[index], self._starts[index]
            first, last = max(begin - start, 0), min(end - start, tensor.nbytes)
            if first < last:
                yield index, first, last
            index += 1

    def read(self, begin: int, out: torch.Tensor) -> None:
        """Fills `out` (uint8, any device) with the bytes from `begin` on; padding reads as zero."""
        covered = 0
        for at, piece in self.pieces(begin, begin + out.numel()):
            if at > covered:
                out[covered:at].zero_()
            out[at : at + piece.numel()].copy_(piece)
            covered = at + piece.numel()
        if covered < out.numel():
            out[covered:].zero_()


def byte_ranges(total_bytes: int, parts: int, part: int) -> tuple[int, int]:
    """Returns begin and end of one of `parts` contiguous stripes, cut where a tensor may begin."""
    blocks = -(-total_bytes // ALIGNMENT_BYTES)
    begin, end = blocks * part // parts, blocks * (part + 1) // parts
    return begin * ALIGNMENT_BYTES, min(end * ALIGNMENT_BYTES, total_bytes)


def digest(tensors: Sequence[torch.Tensor]) -> int:
    """Returns 63 bits that follow from the tensors' bytes and sizes, the same on every device.

    Catches accidents (a flipped bit, exchanged blocks), not intent.
    """
    return digest_of_bytes(bytes_of(t if is_dense(t) else t.contiguous()) for t in tensors)
