"""Checksums of cached bytes: sums of 64-bit words, many values at once, near memory bandwidth.

Every block's sum is multiplied with an odd number of its own. Found for certain: whatever changes the sum of one
block, so any change within one word, and zeros or other data in a page's place but for 1 chance in 2**64; likewise
exchanged blocks. Not found: words exchanged within a block. Not a defence against intent.
"""

from __future__ import annotations

import functools
from typing import Any, TypeAlias

import numpy as np

Words: TypeAlias = np.ndarray[Any, np.dtype[np.uint64]]

BLOCK_WORDS = 512  # a page
_SPREAD = 0x9E3779B97F4A7C15
_MASK_64 = (1 << 64) - 1


@functools.lru_cache(maxsize=64)
def _weights(count: int) -> Words:
    numbers = np.arange(1, count + 1, dtype=np.uint64)
    return (numbers * np.uint64(_SPREAD)) | np.uint64(1)


def checksums(words: Words) -> Words:
    """Returns one checksum for each row. words: [values, words of a value]."""
    values, count = words.shape
    blocks, rest = divmod(count, BLOCK_WORDS)
    sums = np.empty((values, blocks + 1), dtype=np.uint64)
    if blocks:
        whole = words[:, : blocks * BLOCK_WORDS].reshape(values, blocks, BLOCK_WORDS)
        np.add.reduce(whole, axis=2, out=sums[:, :blocks])
    # the length counts too: a value cut by words of zero is another one
    tail = np.add.reduce(words[:, count - rest :], axis=1)
    np.add(tail, np.uint64(count * _SPREAD & _MASK_64), out=sums[:, blocks])
    total: Words = np.add.reduce(sums * _weights(blocks + 1), axis=1)
    return total
