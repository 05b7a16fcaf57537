"""Gives all ranks the same buffers (BatchNorm's statistics): rank 0's are sent before a forward.

Owns the flat form: all buffers of a device as bytes, in one message. Knows nothing of steps; when to
send is the caller's decision. Messages of unequal sizes end a process (Gloo), so where a rank may have buffers of other
shapes, a row of fixed size goes first: what the source has.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Collection

import torch

from bagua_core.communication.communicator import Communicator, Pending
from bagua_core.communication.devices.device_wait import Followed
from bagua_core.model.overlapping_memory import write

_MOST_DEVICES = 129  # the CPU, and as many others as torch numbers

SOURCE = 0  # rank 0 always holds the job's state, so it is never the one that heals


def broadcast_buffers(
    buffers: list[torch.Tensor],
    communicator: Communicator,
    wait: Callable[[Pending], None],
    vote_follows: bool = False,
    unseen: Collection[torch.Tensor] = (),
    source: int = SOURCE,
    may_differ: bool = False,
) -> None:
    """Overwrites `buffers` with those of rank `source`. Raises CollectiveFailed, and then changes none of them.

    unseen: those of them whose values no backward uses. Autograd does not see them change, so that a graph of an
    earlier forward may still be used.
    vote_follows: the step's vote comes after it and a failed step restores the buffers, so the host need not wait for a
    device here; a failure that shows later fails the vote.
    may_differ: the same on all ranks. A rank that has yet to get its copy of the state may have buffers of other shapes
    than the source has; it keeps them.
    """
    groups = [
        # widest types first: each buffer then begins at a multiple of its own width
        sorted((b for b in buffers if b.device == device), key=lambda b: -b.dtype.itemsize)
        for device in dict.fromkeys(b.device for b in buffers)
    ]
    if may_differ:
        own = _layout(groups)
        row = own.clone()
        wait(communicator.broadcast(row, source))
        if not torch.equal(row, own):
            _take_part_without(row, groups, communicator, wait, source)
            return
    arrived: list[tuple[torch.Tensor, torch.Tensor]] = []
    for group in groups:
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


def _layout(groups: list[list[torch.Tensor]]) -> torch.Tensor:
    """Returns a tensor whose first row holds a digest of types and shapes. Each further row is for one message: 1,
    whether the message is of the CPU's memory, and its size."""
    shapes = [[(b.device.type, str(b.dtype), tuple(b.shape)) for b in group] for group in groups]
    row = torch.zeros(1 + _MOST_DEVICES, 3, dtype=torch.int64, device="cpu")
    row[0, 0] = zlib.crc32(repr(shapes).encode())
    for at, group in enumerate(groups, 1):
        is_cpu = group[0].device.type == "cpu"
        row[at] = torch.tensor(
            [1, is_cpu, sum(b.numel() * b.dtype.itemsize for b in group)], dtype=torch.int64, device="cpu"
        )
    return row


def _take_part_without(
    row: torch.Tensor,
    groups: list[list[torch.Tensor]],
    communicator: Communicator,
    wait: Callable[[Pending], None],
    source: int,
) -> None:
    """Receives the messages of a source whose layout is `row`, and drops them."""
    other = next((group[0].device for group in groups if group[0].device.type != "cpu"), torch.device("cuda"))
    for is_there, is_cpu, size_bytes in row[1:].tolist():
        if is_there:
            device = torch.device("cpu") if is_cpu else other
            wait(communicator.broadcast(torch.empty(size_bytes, dtype=torch.uint8, device=device), source))
