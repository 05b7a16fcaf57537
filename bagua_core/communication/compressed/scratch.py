"""Provides reusable memory for messages in transit; memory of an abandoned operation is not reused."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

ALIGNMENT = 64  # bytes


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """A piece of memory. parts: uint8, of the sizes that were asked for, each at a multiple of ALIGNMENT bytes, with
    anything in them."""

    parts: tuple[torch.Tensor, ...]
    memory: torch.Tensor


class Scratch:
    """A pool of memory for messages, used by one thread at a time. A block into which an abandoned operation may still
    write is not given back; the garbage collector frees it."""

    def __init__(self) -> None:
        self._free: list[torch.Tensor] = []

    def take(self, sizes_bytes: Sequence[int], device: torch.device) -> Block:
        ends = list(accumulate((-(-size // ALIGNMENT) * ALIGNMENT for size in sizes_bytes), initial=0))
        memory = self._memory(ends[-1], device)
        parts = (memory[begin : begin + size] for begin, size in zip(ends, sizes_bytes, strict=False))
        return Block(tuple(parts), memory)

    def give_back(self, block: Block) -> None:
        self._free.append(block.memory)

    def _memory(self, size_bytes: int, device: torch.device) -> torch.Tensor:
        here = sorted((m for m in self._free if m.device == device), key=torch.Tensor.numel)
        if not here:
            return torch.empty(size_bytes, dtype=torch.uint8, device=device)
        chosen = next((m for m in here if m.numel() >= size_bytes), here[0])
        self._free = [m for m in self._free if m is not chosen]
        if chosen.numel() < size_bytes:
            return torch.empty(size_bytes, dtype=torch.uint8, device=device)  # and the small one is let go
        return chosen
