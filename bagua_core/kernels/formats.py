"""Computes the sizes of compressed tensors and the offsets of their parts. Pure, and the same as in arithmetic.h.

A compressed tensor is [headers][payload], each padded with zeros to 16 bytes. It says neither its count nor its block
size: peers agree on both, as on the shape of the tensor itself. Owns the default block sizes.
"""

from __future__ import annotations

from bagua_core.kernels.errors import KernelArgumentError

ALIGNMENT = 16  # bytes
LARGEST_BLOCK = 8192  # elements
BLOCK_STEP = 64  # a block size is a multiple of it, so that payloads of blocks begin at whole words

MINMAX_HEADER_BYTES = 8  # low and step, fp32
ONE_BIT_HEADER_BYTES = 4  # mean magnitude, fp32

# Measured (docs/kernels.md): smaller blocks barely lower the error, larger ones barely lower the bytes.
MINMAX_BLOCK = 2048
"""The default block of min-max uint8, in elements. Headers are 0.4 % of the payload."""

ONE_BIT_BLOCK = 4096
"""The default block of one bit, in elements. Headers are 0.8 % of the payload."""


def minmax_payload_at(count: int, block_size: int = MINMAX_BLOCK) -> int:
    """Returns the offset of the codes, in bytes."""
    return _aligned(MINMAX_HEADER_BYTES * blocks_in(count, block_size))


def minmax_bytes(count: int, block_size: int = MINMAX_BLOCK) -> int:
    """Returns the size, in bytes, of `count` values as min-max uint8, in blocks of block_size elements. Raises
    KernelArgumentError."""
    return minmax_payload_at(count, block_size) + _aligned(count)


def one_bit_payload_at(count: int, block_size: int = ONE_BIT_BLOCK) -> int:
    """Returns the offset of the signs, in bytes."""
    return _aligned(ONE_BIT_HEADER_BYTES * blocks_in(count, block_size))


def one_bit_bytes(count: int, block_size: int = ONE_BIT_BLOCK) -> int:
    """Returns the size, in bytes, of `count` values as one bit each, in blocks of block_size elements. Raises
    KernelArgumentError."""
    return one_bit_payload_at(count, block_size) + _aligned(-(-count // 8))


def blocks_in(count: int, block_size: int) -> int:
    """Returns the number of blocks of `count` values. Raises KernelArgumentError for a count or block size that no
    kernel takes."""
    if count < 0:
        raise KernelArgumentError(f"a count of {count} values; it can't be negative")
    if not BLOCK_STEP <= block_size <= LARGEST_BLOCK or block_size % BLOCK_STEP:
        raise KernelArgumentError(
            f"block_size={block_size}; use a multiple of {BLOCK_STEP} from {BLOCK_STEP} to {LARGEST_BLOCK}"
        )
    return -(-count // block_size)


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // ALIGNMENT) * ALIGNMENT
