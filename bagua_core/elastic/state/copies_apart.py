"""Copies tensors into memory that goes back to the system once the last of the copies is dropped.

An allocator keeps what is freed between other allocations. A copy of the whole model that is made in a few steps only,
beside what a forward allocates, would raise the memory of the process by its size for good.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable

import torch

from bagua_core.model.sharded_tensors import copied, local

_ALIGNMENT_BYTES = 64


def copied_apart(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Returns a copy of the memory that this worker has of each tensor: plain tensors. Those on the host share one
    mapping, which lasts as long as any of them."""
    sources = [local(t).detach() for t in tensors]
    size = sum(_slot_bytes(t) for t in sources if _is_plain(t))
    if not size:
        return [copied(t) for t in sources]
    mapping = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory = torch.frombuffer(mapping, dtype=torch.uint8)
    copies, at = [], 0
    for source in sources:
        if not _is_plain(source):
            copies.append(copied(source))
            continue
        slot = memory[at : at + source.nbytes].view(source.dtype)
        # those of a clone: the layout of a checkpoint contains them
        strides = torch.empty_like(source, device="meta").stride()
        copies.append(slot.as_strided(source.shape, strides).copy_(source))
        at += _slot_bytes(source)
    return copies


def _is_plain(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu" and tensor.layout is torch.strided and not tensor.is_quantized


def _slot_bytes(tensor: torch.Tensor) -> int:
    return -(-tensor.nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
