"""Sums gradients of which few are not zero, uncompressed.

Late elements are mostly those of rows that are rarely used: in a step only the rows of its samples have a gradient. So
the values are taken in segments, ranks agree in one small message on the segments in which any of them has something,
and only these travel. A few values travel whole. Knows neither buckets nor moments.
"""

from __future__ import annotations

from collections.abc import Generator

import torch
from torch import Tensor

from bagua_core.communication.communicator import Communicator, Pending, ReduceOp

# The message that chooses segments takes a byte for each: a 256th of the values in fp32.
SEGMENT = 64
# So many values travel whole: 32 KiB in fp32, less time on most networks than a further message and a wait of the host.
WHOLE = 8192


def sum_where_touched(communicator: Communicator, values: Tensor) -> Generator[Pending, None, Tensor]:
    """Sums `values` over all ranks. values: [count], the same count on all ranks; written over. Returns [count], the
    same bits on all ranks."""
    if values.numel() <= WHOLE:
        yield communicator.allreduce(values)
        return values
    segments = values.new_zeros((-(-values.numel() // SEGMENT), SEGMENT))
    segments.view(-1)[: values.numel()] = values
    touched = (segments != 0).any(dim=1).to(torch.uint8)
    yield communicator.allreduce(touched, ReduceOp.MAX)
    # Which segments travel decides the size of the message, so the host waits for the device here, once.
    chosen = touched.nonzero().view(-1)
    moved = segments[chosen]
    if moved.numel():
        yield communicator.allreduce(moved)
        segments[chosen] = moved
    return segments.view(-1)[: values.numel()]
