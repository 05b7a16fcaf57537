"""What did the collectives outside steps return since the last step? Kept so that nobody has to run one twice.

A rank that lost its peers in the middle gets the result that others already returned; a rank that is healed in the
middle replays what it missed. Cleared by the next commit of a step.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable

import torch

from bagua_core.communication.communicator import Communicator, Pending, ReduceOp


class OperationLog:
    def __init__(self) -> None:
        self._results: list[torch.Tensor] = []
        self._next = 0
        self.is_running = False

    @property
    def next_index(self) -> int:
        """Index of the next collective that the script will ask for."""
        return self._next

    def recorded(self, index: int) -> torch.Tensor | None:
        return self._results[index] if index < len(self._results) else None

    def returned(self) -> None:
        self._next += 1

    def record(self, result: torch.Tensor) -> None:
        self._results.append(result.detach().clone())

    def results(self) -> list[torch.Tensor]:
        return list(self._results)

    def replace(self, results: list[torch.Tensor], *, same_step: bool) -> None:
        """Take over another rank's log. The script's place in it stays if it counts from the same step."""
        self._results = list(results)
        if not same_step:
            self._next = 0

    def clear(self) -> None:
        """A step was committed: collectives are counted anew from it."""
        self._results = []
        self._next = 0

    def forget(self) -> None:
        """This worker is no part of the job any more; what the others return now is not for it."""
        self._results = []


class MismatchedCollective(RuntimeError):
    """Workers asked for different collectives at the same place."""


_OPS = list(ReduceOp)


def check_agreement(
    communicator: Communicator,
    index: int,
    tensor: torch.Tensor,
    op: ReduceOp,
    wait: Callable[[Pending], None],
) -> None:
    """All members ask for the same collective? Raises MismatchedCollective, CollectiveFailed."""
    shape = zlib.crc32(repr((tuple(tensor.shape), str(tensor.dtype))).encode())
    own = torch.tensor([index, _OPS.index(op), shape], dtype=torch.int64)
    rows = torch.zeros((communicator.world_size, 3), dtype=torch.int64)
    wait(communicator.allgather(rows, own))
    odd = [r for r, row in enumerate(rows.tolist()) if row != own.tolist()]
    if odd:
        raise MismatchedCollective(
            f"global rank {communicator.global_rank} asks for collective {index} after the step: {op.value} of "
            f"{tuple(tensor.shape)} {tensor.dtype}, but ranks {odd} ask for another. Every worker must call "
            "the same collectives in the same order"
        )


def neutral(tensor: torch.Tensor, op: ReduceOp) -> torch.Tensor:
    """What leaves the result of `op` unchanged, in the shape of `tensor`."""
    if op in (ReduceOp.SUM, ReduceOp.AVG):
        return torch.zeros_like(tensor)
    if op is ReduceOp.PRODUCT:
        return torch.ones_like(tensor)
    if tensor.is_floating_point():
        return torch.full_like(tensor, math.inf if op is ReduceOp.MIN else -math.inf)
    if tensor.dtype is torch.bool:
        return torch.full_like(tensor, op is ReduceOp.MIN)
    info = torch.iinfo(tensor.dtype)
    return torch.full_like(tensor, info.max if op is ReduceOp.MIN else info.min)
