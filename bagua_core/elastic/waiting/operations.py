"""Logs the results of collectives outside steps since the last step, so that no rank has to run one twice.

A rank that lost its peers in the middle gets the result that others already returned; a rank that is healed in the
middle replays what it missed. Of a collective whose results differ from rank to rank only DONE is kept: it ends with
a barrier, so a rank that finds that others passed it has its own result already. Cleared by the next commit of a step.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable

import torch

from bagua_core.communication.communicator import Communicator, Pending, ReduceOp
from bagua_core.communication.reducible import check_reducible
from bagua_core.errors import UserError

DONE = torch.empty(0, dtype=torch.uint8, device="cpu")


class OperationLog:
    def __init__(self) -> None:
        self._results: list[torch.Tensor] = []
        self._next = 0
        self.is_running = False

    @property
    def next_index(self) -> int:
        """The index of the next collective that the script will ask for."""
        return self._next

    def recorded(self, index: int) -> torch.Tensor | None:
        return self._results[index] if index < len(self._results) else None

    def returned(self) -> None:
        self._next += 1

    def record(self, result: torch.Tensor, *, only: bool = False) -> None:
        """Adds a result to the log. only: drop the results before it. They are not needed: all members have called this
        collective, so they have returned from those before it."""
        if only:
            self._results = [DONE] * len(self._results)
        self._results.append(result.detach().clone())

    def results(self) -> list[torch.Tensor]:
        return list(self._results)

    def replace(self, results: list[torch.Tensor], *, same_step: bool) -> None:
        """Takes over another rank's log. The script's place in it stays if it counts from the same step."""
        self._results = list(results)
        if not same_step:
            self._next = 0

    def clear(self) -> None:
        """Empties the log after the commit of a step, from which collectives are counted anew."""
        self._results = []
        self._next = 0

    def forget(self) -> None:
        """Drops the results, since this worker is no part of the job any more; what the others return now is not for
        it."""
        self._results = []


_EQUAL_SHAPES = (
    "Shares of a batch may differ by one sample or be empty: gather rows with allgather_rows(), or keep shares equal "
    "with drop_last=True and a global_batch_size that every number of workers divides"
)


class MismatchedCollective(UserError, RuntimeError):
    """Workers asked for different collectives at the same place."""


def check_agreement(
    communicator: Communicator, index: int, operation: str, asked_of: str, wait: Callable[[Pending], None]
) -> None:
    """Checks that all members ask for the same collective. operation, asked_of (shape and dtype of the tensor): each
    the same text on all that agree.

    Raises MismatchedCollective, CollectiveFailed.
    """
    texts = [zlib.crc32(text.encode()) for text in (operation, asked_of)]
    own = torch.tensor([index, *texts], dtype=torch.int64, device="cpu")
    rows = torch.zeros((communicator.world_size, len(own)), dtype=torch.int64, device="cpu")
    wait(communicator.allgather(rows, own))
    asks = f"global rank {communicator.global_rank} asks for collective {index} after the step: {operation}{asked_of}"
    others = [r for r, row in enumerate(rows.tolist()) if row[:2] != own.tolist()[:2]]
    if others:
        raise MismatchedCollective(
            f"{asks}, but ranks {others} ask for another. Every worker must call the same collectives in the same "
            "order"
        )
    uneven = [r for r, row in enumerate(rows.tolist()) if row != own.tolist()]
    if uneven:
        raise MismatchedCollective(
            f"{asks}, but ranks {uneven} ask for it with another shape or dtype. {_EQUAL_SHAPES}"
        )


def neutral(tensor: torch.Tensor, op: ReduceOp) -> torch.Tensor:
    """Returns what leaves the result of `op` unchanged, in the shape of `tensor`. Raises TypeError as check_reducible
    does."""
    check_reducible(tensor.dtype, op)
    if op in (ReduceOp.SUM, ReduceOp.AVG, ReduceOp.BOR, ReduceOp.BXOR):
        return torch.zeros_like(tensor)
    if op is ReduceOp.PRODUCT:
        return torch.ones_like(tensor)
    if op is ReduceOp.BAND:
        return _all_ones(tensor)
    if tensor.dtype is torch.bool:
        return torch.full_like(tensor, op is ReduceOp.MIN)
    if tensor.is_floating_point():
        # not all of the 8-bit types have an infinity
        limits = torch.finfo(tensor.dtype)
        has_infinity = tensor.dtype.itemsize > 1 or tensor.dtype is torch.float8_e5m2
        greatest = math.inf if has_infinity else limits.max
        return torch.full_like(tensor, greatest if op is ReduceOp.MIN else -greatest)
    info = torch.iinfo(tensor.dtype)
    return torch.full_like(tensor, info.max if op is ReduceOp.MIN else info.min)


def _all_ones(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.dtype is torch.bool:
        return torch.ones_like(tensor)
    ones = torch.empty_like(tensor, memory_format=torch.contiguous_format)
    ones.reshape(-1).view(torch.uint8).fill_(255)
    return ones
