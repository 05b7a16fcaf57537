"""Every collective of all workers with an input that shows its rank, and what each gives."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

import bagua_core as bagua
from tests.core.elastic.worlds_of_workers import Worker

ROOT = 1


def acting(act: Callable[[Worker], Any]) -> Callable[[Worker], Any]:
    """`act` as the script of that worker: bagua's functions are its own in this thread."""

    def as_script(worker: Worker) -> Any:
        worker.thread.engine = SimpleNamespace(  # type: ignore[attr-defined]
            collectives=worker.collectives,
            place_of_script=worker.place_of_script,
            replica_place=worker.replica_place,
            has_fillers=worker.has_fillers,
        )
        try:
            return act(worker)
        except BaseException:
            worker.job.give_up()
            raise

    return as_script


def rank_of(worker: Worker) -> int:
    assert worker.communicator is not None
    return worker.communicator.global_rank


# Every collective of all workers, with an input that shows who it came from. Not in place.
CALLS: dict[str, Callable[[int, int], Any]] = {
    "allreduce": lambda rank, size: bagua.allreduce(torch.tensor([rank + 1.0])),
    "reduce": lambda rank, size: bagua.reduce(torch.tensor([rank + 1.0]), ROOT),
    "reduce_scatter": lambda rank, size: bagua.reduce_scatter(torch.arange(size * 1.0) + rank),
    "broadcast": lambda rank, size: bagua.broadcast(torch.tensor([rank]), ROOT),
    "broadcast_object": lambda rank, size: bagua.broadcast_object({"rank": rank}, ROOT),
    "allgather": lambda rank, size: bagua.allgather(torch.tensor([rank])),
    "allgather_rows": lambda rank, size: bagua.allgather_rows(torch.full((rank, 2), rank)),
    "gather": lambda rank, size: bagua.gather(torch.tensor([rank]), ROOT),
    "scatter": lambda rank, size: bagua.scatter(
        torch.tensor(-1), torch.arange(size) * 10 if rank == ROOT else None, ROOT
    ),
    "alltoall": lambda rank, size: bagua.alltoall(torch.arange(size) + 10 * rank),
    "alltoall_v": lambda rank, size: bagua.alltoall_v(torch.full((size * rank,), rank), [rank] * size),
    "barrier": lambda rank, size: bagua.barrier(),
}


CUT = {"reduce_scatter", "scatter", "alltoall", "alltoall_v"}


ROOTED = {"reduce", "broadcast", "broadcast_object", "gather", "scatter"}


def expected(name: str, rank: int, size: int) -> Any:
    ranks = list(range(size))
    return {
        "allreduce": [sum(r + 1.0 for r in ranks)],
        "reduce": [sum(r + 1.0 for r in ranks)] if rank == ROOT else None,
        "reduce_scatter": sum(rank + 1.0 * r for r in ranks),
        "broadcast": [ROOT],
        "broadcast_object": {"rank": ROOT},
        "allgather": [[r] for r in ranks],
        "allgather_rows": [[r, r] for r in ranks for _ in range(r)],
        "gather": [[r] for r in ranks] if rank == ROOT else None,
        "scatter": 10 * rank,
        "alltoall": [rank + 10 * r for r in ranks],
        "alltoall_v": ([r for r in ranks for _ in range(r)], ranks),
        "barrier": None,
    }[name]


def plain(result: Any) -> Any:
    if isinstance(result, tuple):
        return tuple(plain(each) for each in result)
    return result.tolist() if isinstance(result, torch.Tensor) else result
