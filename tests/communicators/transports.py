"""The transports under test, the types they reduce, and ranks that act in threads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch.utils._pytree import tree_map_only

from bagua_core.communication.communicator import (
    Communicator,
    Pending,
    ReduceOp,
)
from tests.core.communication.emulated_nccl import emulated_world
from tests.core.communication.nccl_worlds import (
    by_device_world,
    nccl_world,
    staged_world,
)
from tests.core.communication.reconfigured import can_reconfigure, reconfigured_world
from tests.core.communication.worlds import gloo_world, in_process_world
from tests.core.communication.worlds import run_ranks as in_threads

T = TypeVar("T")


RELEASE_S = 0.05


World = Callable[[int], Sequence[Communicator]]


ARITHMETIC = [ReduceOp.SUM, ReduceOp.AVG, ReduceOp.MIN, ReduceOp.MAX, ReduceOp.PRODUCT]


WHOLE = [
    torch.int8,
    torch.uint8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint16,
    torch.uint32,
    torch.uint64,
]


FLOATING = [
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.float8_e5m2,
    torch.float8_e4m3fn,
]


@dataclass(frozen=True)
class Transport:
    """late_end: an operation given up ends when the late peer comes; else the transport ends it. late_write: it writes
    into its buffer then."""

    build: World
    late_end: bool = True
    late_write: bool = True


TRANSPORTS = {
    "gloo": Transport(gloo_world),
    "in_process": Transport(in_process_world),
    "by_device": Transport(by_device_world),
    "staged": Transport(staged_world, late_write=False),
    "nccl_emulated": Transport(emulated_world, late_end=False, late_write=False),
    "nccl": Transport(nccl_world, late_end=False, late_write=False),
}
if can_reconfigure():
    TRANSPORTS["gloo_reconfigured"] = Transport(reconfigured_world)


def run_ranks(world: Sequence[Communicator], act: Callable[[Any], T]) -> list[T]:
    """act(communicator) in a thread each, tensors where that carries them; what it returns is brought to the CPU."""

    def there(communicator: Communicator) -> Any:
        with torch.device(communicator.device):
            return tree_map_only(torch.Tensor, lambda t: t.cpu(), act(communicator))

    return in_threads(world, there)


def start_alone(kind: str, c: Communicator) -> Pending:
    starts: dict[str, Callable[[], Pending]] = {
        "allreduce": lambda: c.allreduce(torch.ones(4)),
        "broadcast": lambda: c.broadcast(torch.ones(4), source=1),
        "allgather": lambda: c.allgather(torch.zeros(2, 4), torch.ones(4)),
        "alltoall": lambda: c.alltoall(torch.zeros(2, 4), torch.ones(2, 4)),
        "reduce_scatter": lambda: c.reduce_scatter(torch.zeros(4), torch.ones(2, 4)),
        "alltoall_v": lambda: c.alltoall_v(torch.zeros(2, 4), torch.ones(2, 4), [1, 1], [1, 1]),
        "reduce": lambda: c.reduce(torch.ones(4), destination=0),
        "gather": lambda: c.gather(torch.zeros(2, 4), torch.ones(4), destination=0),
        "scatter": lambda: c.scatter(torch.zeros(4), torch.ones(2, 4), source=1),
        "barrier": lambda: c.barrier(),
        "receive": lambda: c.receive(torch.ones(4), source=1, tag=9),
        "send": lambda: c.send(torch.ones(4), destination=0, tag=9),
    }
    with torch.device(c.device):
        return starts[kind]()
