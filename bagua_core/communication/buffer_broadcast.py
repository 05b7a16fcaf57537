"""How do all ranks come to use the same buffers (BatchNorm's statistics)? Rank 0's are sent before a forward.

Owns the flat form: all buffers of a device as bytes, in one message. Knows nothing of steps; when to
send is the caller's decision.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from bagua_core.communication.communicator import Communicator, Pending

SOURCE = 0  # rank 0 always holds the job's state, so it is never the one that heals


def broadcast_buffers(
    buffers: list[torch.Tensor], communicator: Communicator, wait: Callable[[Pending], None]
) -> None:
    """Overwrite `buffers` with those of rank 0. Raises CollectiveFailed, and then changes none of them."""
    arrived: list[tuple[torch.Tensor, torch.Tensor]] = []
    for device in dict.fromkeys(b.device for b in buffers):
        # widest types first: each buffer then begins at a multiple of its own width
        group = sorted((b for b in buffers if b.device == device), key=lambda b: -b.dtype.itemsize)
        flat = torch.cat([b.detach().reshape(-1).view(torch.uint8) for b in group])
        wait(communicator.broadcast(flat, SOURCE))
        at = 0
        for buffer in group:
            size_bytes = buffer.numel() * buffer.dtype.itemsize
            arrived.append((buffer, flat[at : at + size_bytes].view(buffer.dtype).view(buffer.shape)))
            at += size_bytes
    if communicator.global_rank == SOURCE:
        return
    with torch.no_grad():
        for buffer, value in arrived:
            buffer.copy_(value)
