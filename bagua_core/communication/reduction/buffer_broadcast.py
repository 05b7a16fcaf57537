"""Gives all ranks the same buffers (BatchNorm's statistics): rank 0's are sent before a forward.

Owns the flat form: all buffers of a device as bytes, in one message. Knows nothing of steps; when to
send is the caller's decision.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

import torch

from bagua_core.communication.communicator import Communicator, Pending
from bagua_core.communication.devices.device_wait import Followed
from bagua_core.model.overlapping_memory import write

SOURCE = 0  # rank 0 always holds the job's state, so it is never the one that heals


def broadcast_buffers(
    buffers: list[torch.Tensor],
    communicator: Communicator,
    wait: Callable[[Pending], None],
    vote_follows: bool = False,
    unseen: Collection[torch.Tensor] = (),
    source: int = SOURCE,
) -> None:
    """Overwrite `buffers` with those of rank `source`. Raises CollectiveFailed, and then changes none of them.

    unseen: those of them whose values no backward uses. Autograd does not see them change, so that a graph of an
    earlier forward may still be used.
    vote_follows: the step's vote comes after it and a failed step restores the buffers, so the host need not wait for a
    device here; a failure that shows later fails the vote.
    """
    arrived: list[tuple[torch.Tensor, torch.Tensor]] = []
    for device in dict.fromkeys(b.device for b in buffers):
        # widest types first: each buffer then begins at a multiple of its own width
        group = sorted((b for b in buffers if b.device == device), key=lambda b: -b.dtype.itemsize)
        # a view that is conjugated or negated lazily has other bytes than its values
        plain = [b.detach().resolve_conj().resolve_neg() for b in group]
        flat = torch.cat([b.reshape(-1).view(torch.uint8) for b in plain])
        pending = communicator.broadcast(flat, source)
        wait(Followed(pending) if vote_follows else pending)
        at = 0
        for buffer in group:
            size_bytes = buffer.numel() * buffer.dtype.itemsize
            arrived.append((buffer, flat[at : at + size_bytes].view(buffer.dtype).view(buffer.shape)))
            at += size_bytes
    if communicator.global_rank == source:
        return
    hidden = {id(buffer) for buffer in unseen}
    with torch.no_grad():
        for buffer, value in arrived:
            write(buffer.data if id(buffer) in hidden else buffer, value)
