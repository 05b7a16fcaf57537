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
from bagua_core.communication.reduction.operation_queue import Job

# What the algorithms of rare exchanges call a compression, and its compressor; None: not compressed.
COMPRESSIONS = {"none": None, "uint8": "minmax_uint8", "int4": "minmax_int4"}

# A buffer that nothing else uses meanwhile is summed in so many pieces: the network is idle while the first is encoded
# and the last decoded. Pieces that are too small cost more round trips than they save; memory limits large ones.
_PIECES = 16
_LEAST_PIECE, _LARGEST_PIECE = 1 << 20, 1 << 24  # values


def piece_size(count: int, ranks: int) -> int:
    """Returns the number of values of each piece in which `ranks` ranks sum `count` values; a multiple of `ranks`, so
    that no part is copied."""
    size = min(max(-(-count // _PIECES), _LEAST_PIECE), _LARGEST_PIECE)
    return -(-size // ranks) * ranks


def form_of(compress: str) -> WithFeedback | None:
    """Returns the compression of a name in COMPRESSIONS; None for "none"."""
    compressor = COMPRESSIONS[compress]
    return None if compressor is None else with_feedback(compressor)


def feedback_sum(
    communicator: Communicator,
    form: WithFeedback,
    values: torch.Tensor,
    before: torch.Tensor,
    left: torch.Tensor,
) -> Job:
    """Sums `values + before` over the ranks, into `values`; all get the same bits.

    before: this rank's error of the last sum; read only. left: its error afterwards, in units of the sum. Both `values`
    and `left` hold something else until the last collective is complete. All of one shape [values], fp32, contiguous,
    on one device. Raises CollectiveFailed.
    """
    ranks, count = communicator.world_size, values.numel()
    size = -(-count // ranks)
    rows, errors, lost = (_in_rows(flat, ranks, size) for flat in (values, before, left))
    sent = torch.zeros(ranks, form.size_bytes(size), dtype=torch.uint8, device=values.device)
    form.encode(rows, errors, lost, sent)
    received = torch.empty_like(sent)
    yield Followed(communicator.alltoall(received, sent))
    own, lost_of_sum = values.new_zeros(size), values.new_zeros(size)
    form.sum_of(received, own)
    summed, gathered = torch.zeros_like(sent[0]), torch.empty_like(sent)
    form.encode(own, torch.zeros_like(own), lost_of_sum, summed)
    yield communicator.allgather(gathered, summed)
    lost[communicator.global_rank].add_(lost_of_sum)
    form.decompress(gathered, rows)
    if count < ranks * size:
        values.copy_(rows.view(-1)[:count])
        left.copy_(lost.view(-1)[:count])


def _in_rows(flat: torch.Tensor, ranks: int, size: int) -> torch.Tensor:
    """Returns `flat` as [ranks, size]: itself, or a copy with zeros behind it."""
    if flat.numel() == ranks * size:
        return flat.view(ranks, size)
    filled = flat.new_zeros(ranks * size)
    filled[: flat.numel()] = flat
    return filled.view(ranks, size)
