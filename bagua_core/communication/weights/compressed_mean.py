"""Averages a tensor over all ranks in one byte a value: each rank makes the mean of one part, and all get it."""

from __future__ import annotations

import torch

from bagua_core.communication.communicator import Communicator
from bagua_core.communication.devices.device_wait import Followed
from bagua_core.communication.reduction.operation_queue import Job
from bagua_core.kernels import minmax_compress, minmax_decompress, minmax_reduce


def compressed_mean(communicator: Communicator, values: torch.Tensor) -> Job:
    """Replaces `values` by the mean over the ranks, in place; all get the same bits. values: [n], floating point.

    Raises CollectiveFailed.
    """
    count = communicator.world_size
    padded = values.new_zeros((count, -(-values.numel() // count)))
    padded.view(-1)[: values.numel()] = values
    sent = minmax_compress(padded)
    received = torch.empty_like(sent)
    yield Followed(communicator.alltoall(received, sent))
    part = minmax_reduce(received, padded.shape[1], scale=1 / count)
    yield communicator.allgather(sent, part)
    minmax_decompress(sent, padded)
    values.copy_(padded.view(-1)[: values.numel()])
