"""Compresses in four bits by min-max: values as codes on a grid of 16 between the least and the greatest of their
block.

The grid is that of the eight-bit form (docs/kernels.md) with fewer codes. It uses torch's operators; there is no kernel
yet.
"""

from __future__ import annotations

import torch
from torch.nn.functional import pad

from bagua_core.communication.compressed.compressor import Compressor
from bagua_core.kernels.minmax_grid import minmax_codes

# Low and step of a block take 8 bytes, so a value takes 4.25 bits. Larger blocks barely lower that; in smaller ones the
# grid is not much finer.
BLOCK = 256
_HEADER_BYTES = 8
# Values of a row that are handled at a time on a CPU, so that each operator finds them in the processor's second cache.
_NEAR = 1 << 15


def _pieces(rows: torch.Tensor) -> list[tuple[int, int]]:
    """Returns the first and last column of each piece, of whole blocks but for the last one. rows: [rows, count]."""
    count = rows.shape[1]
    size = _NEAR if rows.device.type == "cpu" else max(count, 1)
    return [(first, min(first + size, count)) for first in range(0, count, size)]


class MinMaxInt4(Compressor):
    """The compressor of four bits. A compressed row is [low, step of each block: fp32][two codes a byte, the first in
    its low bits]."""

    name = "minmax_int4"

    def size_bytes(self, count: int) -> int:
        size = self._payload_at(count) + -(-count // 2)
        return -(-size // 4) * 4  # so that the next row's headers are aligned

    def compress(self, values: torch.Tensor, out: torch.Tensor) -> None:
        payload_at = self._payload_at(values.shape[1])
        out[:, payload_at:].zero_()
        for first, last in _pieces(values):
            headers, codes = minmax_codes(values[:, first:last].detach().float(), BLOCK, 15)
            out[:, self._payload_at(first) : self._payload_at(last)] = headers.contiguous().view(torch.uint8)
            pairs = pad(codes, (0, (last - first) % 2)).contiguous().view(torch.int16)
            # on a little-endian machine the second code of a pair is the high byte; the result keeps the low byte
            out[:, payload_at + first // 2 : payload_at + (last + 1) // 2] = pairs | (pairs >> 4)

    def decompress(self, compressed: torch.Tensor, count: int) -> torch.Tensor:
        payload_at = self._payload_at(count)
        values = torch.empty(len(compressed), count, dtype=torch.float32, device=compressed.device)
        for first, last in _pieces(values):
            headers = compressed[:, self._payload_at(first) : self._payload_at(last)].contiguous()
            low_and_step = headers.view(torch.float32).view(len(headers), -1, 2)
            pairs = compressed[:, payload_at + first // 2 : payload_at + (last + 1) // 2].to(torch.int16)
            codes = ((pairs | (pairs << 4)) & 0x0F0F).view(torch.uint8)
            values[:, first:last] = codes[:, : last - first]
            whole = (last - first) // BLOCK  # blocks; the last one may be shorter
            _apply_grid(values[:, first : first + whole * BLOCK], low_and_step[:, :whole])
            _apply_grid(values[:, first + whole * BLOCK : last], low_and_step[:, whole:])
        return values

    def _payload_at(self, count: int) -> int:
        return _HEADER_BYTES * -(-count // BLOCK)


def _apply_grid(codes: torch.Tensor, low_and_step: torch.Tensor) -> None:
    """Replaces codes by their values, in place. codes: fp32, [rows, blocks of one size]; low_and_step: [rows, blocks,
    2]."""
    if codes.numel():
        codes.view(*low_and_step.shape[:2], -1).mul_(low_and_step[..., 1:]).add_(low_and_step[..., :1])
