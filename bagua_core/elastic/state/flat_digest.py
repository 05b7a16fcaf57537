"""Computes a fast digest of many bytes, the same on every device: position-weighted sums of 64-bit words.

Owns only the arithmetic, which is exact (integers modulo 2**64), so CPU and GPU agree bit for bit. Whole blocks of
words are multiplied with fixed odd numbers and summed; the blocks' sums are chained, so that exchanged words or blocks
change the result. Not a defence against intent.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable

import torch

_BLOCK_WORDS = 1 << 17  # 1 MiB
_BLOCKS_AT_ONCE = 64  # bounds the temporary memory on an accelerator
_ROW_WORDS = 1 << 13  # even; the weights of a row are 64 KiB, which stay in a CPU's cache
_SPREAD = 0x2545F4914F6CDD1D
_MASK_64 = (1 << 64) - 1
_CHAIN = 0x9E3779B97F4A7C15


@functools.cache
def _weights(count: int, device: torch.device) -> torch.Tensor:
    """Returns the weights of the first `count` words of a block.

    They are odd, so that no change of a single word is lost, and spread, so that exchanged words are not lost.
    """
    return (torch.arange(1, count + 1, dtype=torch.int64, device="cpu") * _SPREAD | 1).to(device)


def digest_of_bytes(runs: Iterable[torch.Tensor]) -> int:
    """Returns a digest of `runs` with 63 bits, so that it fits an int64 tensor. runs: one-dimensional uint8 tensors."""
    state = _CHAIN
    for run in runs:
        for value in (run.numel(), *_block_sums(run)):
            state = ((state ^ (value & _MASK_64)) * _CHAIN) & _MASK_64
            state ^= state >> 29
    return state >> 1


def _block_sums(run: torch.Tensor) -> list[int]:
    words = _words(run)
    if run.device.type == "cpu":
        return [_sum_on_host(block) for block in torch.split(words, _BLOCK_WORDS)]
    weights = _weights(_BLOCK_WORDS, run.device)
    whole = words.numel() // _BLOCK_WORDS * _BLOCK_WORDS
    parts = []
    if whole:
        for blocks in torch.split(words[:whole].view(-1, _BLOCK_WORDS), _BLOCKS_AT_ONCE):
            parts.append((blocks * weights).sum(dim=1))
    if whole < words.numel():
        rest = words[whole:]
        parts.append((rest * weights[: rest.numel()]).sum().view(1))
    return [] if not parts else torch.cat(parts).tolist()


def _sum_on_host(block: torch.Tensor) -> int:
    """Returns the weighted sum of a block's words, modulo 2**64.

    The weight of word i is i * _SPREAD, and 1 more where i is even. So a row of words has the weights of the first row
    and beside them one number, by which the plain sum of its words counts.
    """
    weights = _weights(_ROW_WORDS, block.device)
    if block.numel() <= _ROW_WORDS:
        return int(torch.dot(block, weights[: block.numel()]))
    whole = block.numel() // _ROW_WORDS
    rows, rest = block[: whole * _ROW_WORDS].view(whole, _ROW_WORDS), block[whole * _ROW_WORDS :]
    weighted, plain = torch.mv(rows, weights).tolist(), rows.sum(dim=1).tolist()
    if rest.numel():
        weighted.append(int(torch.dot(rest, weights[: rest.numel()])))
        plain.append(int(rest.sum()))
    return sum(
        w + number * _ROW_WORDS * _SPREAD * p
        for number, (w, p) in enumerate(zip(weighted, plain, strict=True))
    )


def _words(run: torch.Tensor) -> torch.Tensor:
    """Returns the bytes of `run` as int64 words; the last word is filled up with zeros."""
    count = run.numel()
    aligned = run.data_ptr() % 8 == 0 and run.storage_offset() % 8 == 0
    if aligned and count % 8 == 0:
        return run.view(torch.int64)
    if not aligned or count < 8 * _BLOCK_WORDS:
        padded = torch.zeros(-(-count // 8) * 8, dtype=torch.uint8, device=run.device)
        padded[:count] = run
        return padded.view(torch.int64)
    tail = torch.zeros(8, dtype=torch.uint8, device=run.device)
    tail[: count % 8] = run[count - count % 8 :]
    return torch.cat([run[: count - count % 8].view(torch.int64), tail.view(torch.int64)])
