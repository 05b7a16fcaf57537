"""The bytes that Gloo and NCCL count as sent are the same for the same operations."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from bagua_core.communication import traffic
from bagua_core.communication.communicator import STATE_TAG, Communicator, Pending
from tests.communicators.transports import TRANSPORTS, World, run_ranks

ROW = 4 * 6  # bytes of a row of six elements


def rows(count: int) -> torch.Tensor:
    return torch.ones(count, 6)


def neighbours(c: Communicator, tag: int) -> list[Pending]:
    send = c.send(rows(1), (c.global_rank + 1) % c.world_size, tag)
    return [send, c.receive(rows(1), (c.global_rank - 1) % c.world_size, tag)]


OPERATIONS: dict[str, tuple[Callable[[Communicator], Pending | list[Pending]], int]] = {
    "allreduce": (lambda c: c.allreduce(rows(2)), 2 * ROW),
    "allreduce of half precision": (lambda c: c.allreduce(rows(2).bfloat16()), ROW),
    "reduce": (lambda c: c.reduce(rows(2), 0), 2 * ROW),
    "reduce_scatter": (lambda c: c.reduce_scatter(rows(1)[0], rows(3)), 3 * ROW),
    "broadcast": (lambda c: c.broadcast(rows(2), 0), 2 * ROW),
    "allgather": (lambda c: c.allgather(rows(3), rows(1)[0]), ROW),
    "gather": (lambda c: c.gather(rows(3) if c.global_rank == 0 else None, rows(1)[0], 0), ROW),
    "scatter": (lambda c: c.scatter(rows(1)[0], rows(3) if c.global_rank == 0 else None, 0), ROW),
    "alltoall": (lambda c: c.alltoall(rows(3), rows(3)), 3 * ROW),
    "alltoall_v": (lambda c: c.alltoall_v(rows(6), rows(6), [2, 2, 2], [2, 2, 2]), 6 * ROW),
    "messages": (lambda c: neighbours(c, 1), ROW),
    "copies of the state": (lambda c: neighbours(c, STATE_TAG), 0),
    "nothing": (lambda c: c.allreduce(rows(0)), 0),
}


def counted_bytes(build: World, size: int, begin: Callable[[Communicator], Pending | list[Pending]]) -> int:
    """The bytes that all ranks count for one operation."""
    world = build(size)

    def act(communicator: Communicator) -> None:
        begun = begin(communicator)
        for pending in begun if isinstance(begun, list) else [begun]:
            pending.wait()

    before = traffic.to_collectives.total_bytes
    run_ranks(world, act)
    counted = traffic.to_collectives.total_bytes - before
    for communicator in world:
        communicator.close()
    return counted


@pytest.mark.parametrize("name", ["gloo", "nccl_emulated"])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_each_rank_counts_its_payload_once(name: str, operation: str) -> None:
    begin, expected = OPERATIONS[operation]
    assert counted_bytes(TRANSPORTS[name].build, 3, begin) == 3 * expected


@pytest.mark.parametrize("name", ["gloo", "nccl_emulated"])
def test_a_rank_alone_sends_nothing(name: str) -> None:
    assert counted_bytes(TRANSPORTS[name].build, 1, lambda c: c.allreduce(rows(2))) == 0
