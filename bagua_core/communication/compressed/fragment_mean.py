"""Computes the weighted mean of the workers' pseudo-gradients of one fragment, on a lane beside the steps.

Traffic goes in pieces, one after the other, so that a step's own small messages never queue behind more than one piece.
What lies on a GPU travels through the host's memory, see background_average.py. Compressed, a piece is summed as in
feedback_sum.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from bagua_core.communication.communicator import Communicator
from bagua_core.communication.compressed.compression import WithFeedback
from bagua_core.communication.compressed.feedback_sum import feedback_sum
from bagua_core.communication.devices import device_order
from bagua_core.communication.weights.background_average import PIECE_BYTES
from bagua_core.communication.weights.fragment_schedule import shares_of

_PIECE_VALUES = PIECE_BYTES  # compressed, a value takes a byte at most


@dataclass(frozen=True, slots=True)
class Feedback:
    """The compression of an exchange, with its errors. before: what this rank has not sent yet, in units of the mean;
    read only. left: the same afterwards. Both fp32, on the host, of the gradients' shapes."""

    form: WithFeedback
    before: Sequence[torch.Tensor]
    left: Sequence[torch.Tensor]


def weighted_mean(
    lane: Communicator, gradients: Sequence[torch.Tensor], weight: float, feedback: Feedback | None = None
) -> None:
    """Replaces `gradients` by their weighted mean over the ranks, in place; all ranks get the same bits.

    weight: of this rank; see `shares_of`. feedback None: not compressed.
    Raises CollectiveFailed.
    """
    weights = torch.empty(lane.world_size, 1, dtype=torch.float64, device="cpu")
    lane.allgather(weights, torch.tensor([weight], dtype=torch.float64, device="cpu")).wait()
    share = shares_of(weights.flatten().tolist())[lane.global_rank]
    for number, flat in enumerate(gradients):
        order = device_order.order_of([flat])
        host = flat
        if order is not device_order.HOST:
            host = order.copy_to_host(flat)
            order.now().wait(lane.abort_flag.check)
        host.mul_(share)
        if feedback is None:
            for piece in torch.split(host, max(1, PIECE_BYTES // host.element_size())):
                lane.allreduce(piece).wait()
        else:
            pieces = (host, feedback.before[number], feedback.left[number])
            for part in zip(*(torch.split(p, _PIECE_VALUES) for p in pieces), strict=True):
                for pending in feedback_sum(lane, feedback.form, *part):
                    pending.wait()
        if host is not flat:
            order.copy_from_host(host, flat)
