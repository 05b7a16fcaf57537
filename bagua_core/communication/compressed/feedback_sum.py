"""Sums a tensor over all ranks in compressed form, and keeps what compression lost for the next sum.

Each rank sums one part, and all get it from there. What a rank did not send of its values, and as the owner of a part
did not send of the sum, is its error: it is added to the values of the next sum, so nothing is lost in the long run.
"""

from __future__ import annotations

import torch

from bagua_core.communication.communicator import Communicator
from bagua_core.communication.compressed.compression import WithFeedback
from bagua_core.communication.compressed.compressor import with_feedback
from bagua_core.communication.devices.device_wait import Followed
from bagua_core.communication.reduction.conveyor import Job

# What the algorithms of rare exchanges call a compression, and its compressor; None: not compressed.
COMPRESSIONS = {"none": None, "uint8": "minmax_uint8", "int4": "minmax_int4"}


def form_of(compress: str) -> WithFeedback | None:
    """The compression of a name in COMPRESSIONS; None for "none"."""
    compressor = COMPRESSIONS[compress]
    return None if compressor is None else with_feedback(compressor)


def feedback_sum(
    communicator: Communicator,
    form: WithFeedback,
    values: torch.Tensor,
    before: torch.Tensor,
    left: torch.Tensor,
) -> Job:
    """Sum of `values + before` over the ranks, into `values`; all get the same bits.

    before: this rank's error of the last sum; read only. left: its error afterwards, in units of the sum; written when
    the last collective is complete. All of one shape [values], fp32, on one device. Raises CollectiveFailed.
    """
    ranks, count = communicator.world_size, values.numel()
    size = -(-count // ranks)
    rows, errors, lost = (values.new_zeros(ranks, size) for _ in range(3))
    rows.view(-1)[:count], errors.view(-1)[:count] = values, before
    sent = torch.zeros(ranks, form.size_bytes(size), dtype=torch.uint8, device=values.device)
    form.encode(rows, errors, lost, sent)
    received = torch.zeros_like(sent)
    yield Followed(communicator.alltoall(received, sent))
    own, lost_of_sum = values.new_zeros(size), values.new_zeros(size)
    form.sum_of(received, own)
    summed, gathered = torch.zeros_like(sent[0]), torch.zeros_like(sent)
    form.encode(own, torch.zeros_like(own), lost_of_sum, summed)
    yield communicator.allgather(gathered, summed)
    lost[communicator.global_rank].add_(lost_of_sum)
    form.decompress(gathered, rows)
    values.copy_(rows.view(-1)[:count])
    left.copy_(lost.view(-1)[:count])
