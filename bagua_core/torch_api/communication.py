"""Collectives in the form that scripts of the original call them: one tensor that is sent, one that is received into.

Owns the order of arguments and the layout of tensors; what a collective does, and what becomes of it when a worker is
lost, is bagua_core/collectives.py. Tensors may lie on the CPU. Ranks are those of get_rank(). A received tensor has as
many elements as all members' parts together, in any shape. Invariant: nothing is written if a collective raises.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from bagua_contract.environment import WorkerEnvironment
from bagua_core import collectives
from bagua_core.communication.communicator import ReduceOp
from bagua_core.torch_api.script_world import this_script

_Value = TypeVar("_Value")


@dataclass(frozen=True, slots=True)
class BaguaProcessGroup:
    """group None: all workers, whoever they are by then."""

    group: collectives.Group | None = None

    def get_global_communicator(self) -> BaguaProcessGroup:
        """What collectives take as `comm`."""
        return self


Comm = BaguaProcessGroup | collectives.Group | None


def init_process_group(
    store: Any = None,
    rank: int = -1,
    world_size: int = -1,
    local_world_size: int = -1,
    elastic: bool = False,
) -> None:
    """Join the job; under plain `python`, be a world of one. From now on ranks and world size are known.

    store, rank, world_size, local_world_size: the job decides them; those given must agree with it. elastic: the script
    draws from ElasticDataLoader or calls next_step(), so workers may come and go, and ranks are known from the first
    step on (see docs/original-scripts.md). Raises ValueError, NotLaunchedError, LateWorkerError.
    """
    if store is not None:
        raise ValueError("store: workers meet through bagua-launch; leave it out")
    script = this_script()
    script.world.begin(elastic)
    if elastic:
        script.steps.leave_to_script()
    for name, given, found in (
        ("rank", rank, get_rank()),
        ("world_size", world_size, get_world_size()),
        ("local_world_size", local_world_size, get_local_size()),
    ):
        if given not in (-1, found):
            raise ValueError(
                f"{name}={given}, but in this job it is {found}; leave it out, the job decides it"
            )


def get_rank() -> int:
    """Global rank of this worker; it may change when a worker is lost."""
    script = this_script()
    script.world.join()
    return script.engine.place_of_script()[0]


def get_world_size() -> int:
    """Workers of the job by now."""
    script = this_script()
    script.world.join()
    return script.engine.place_of_script()[1]


def get_local_rank() -> int:
    """Index of this worker's device on its node; fixed for the life of the process. 0 under --virtual-local-rank."""
    return this_script().engine.local_rank


def get_local_size() -> int:
    """Places for workers on this node."""
    if not WorkerEnvironment.is_present(os.environ):
        return 1
    return WorkerEnvironment.decode(os.environ).slots


def new_group(ranks: Sequence[int] | None = None, stream: Any = None) -> BaguaProcessGroup:
    """A group for `comm`; None: all workers. stream: collectives return when they are done, so there is none.

    A group is its workers: once one of them is lost its collectives raise PeerLostError. Raises ValueError.
    """
    _joined()
    return BaguaProcessGroup(None if ranks is None else collectives.new_group(ranks))


def _joined() -> None:
    this_script().world.join()


def _group(comm: Comm) -> collectives.Group | None:
    _joined()
    return comm.group if isinstance(comm, BaguaProcessGroup) else comm


def _place(comm: Comm) -> tuple[int, int]:
    """This worker's rank and how many there are. Raises ValueError outside the group."""
    group = _group(comm)
    if group is None:
        return this_script().engine.place_of_script()
    if group.rank is None:
        raise ValueError(f"this worker is not in the group {list(group.ranks)}")
    return group.rank, group.size


def _fill(received: torch.Tensor, result: torch.Tensor) -> None:
    """Raises ValueError if they differ in number of elements."""
    if received.numel() != result.numel():
        raise ValueError(
            f"{result.numel()} elements arrived and recv_tensor has {received.numel()}; it needs as many as all "
            f"members' parts together, and there are {get_world_size()} workers now"
        )
    with torch.no_grad():
        received.copy_(result.reshape(received.shape))


def _rows(tensor: torch.Tensor, members: int) -> torch.Tensor:
    """tensor as [members, elements of each]. Raises ValueError."""
    if tensor.numel() % members:
        raise ValueError(
            f"a tensor of {tensor.numel()} elements can't be split evenly among {members} members"
        )
    return tensor.reshape(members, -1)


def _leading(tensor: torch.Tensor, count: int) -> torch.Tensor:
    """The first `count` elements of `tensor`, as a view. Raises ValueError."""
    if not tensor.is_contiguous() or tensor.numel() < count:
        raise ValueError(
            f"{count} elements are needed at the beginning of a contiguous tensor, not {tuple(tensor.shape)}"
        )
    return tensor.view(-1)[:count]


# -- reductions


def allreduce(
    send_tensor: torch.Tensor, recv_tensor: torch.Tensor, op: ReduceOp = ReduceOp.SUM, comm: Comm = None
) -> None:
    """recv_tensor: `op` over all members' send_tensor."""
    _fill(recv_tensor, collectives.allreduce(send_tensor, op, _group(comm)))


def allreduce_inplace(tensor: torch.Tensor, op: ReduceOp = ReduceOp.SUM, comm: Comm = None) -> None:
    allreduce(tensor, tensor, op, comm)


def reduce(
    send_tensor: torch.Tensor,
    recv_tensor: torch.Tensor,
    dst: int,
    op: ReduceOp = ReduceOp.SUM,
    comm: Comm = None,
) -> None:
    """As allreduce; recv_tensor is written on rank `dst` alone."""
    result = collectives.reduce(send_tensor, dst, op, _group(comm))
    if result is not None:
        _fill(recv_tensor, result)


def reduce_inplace(tensor: torch.Tensor, dst: int, op: ReduceOp = ReduceOp.SUM, comm: Comm = None) -> None:
    reduce(tensor, tensor, dst, op, comm)


def reduce_scatter(
    send_tensor: torch.Tensor, recv_tensor: torch.Tensor, op: ReduceOp = ReduceOp.SUM, comm: Comm = None
) -> None:
    """recv_tensor: this member's part of `op` over all members' send_tensor."""
    rows = _rows(send_tensor, _place(comm)[1])
    _fill(recv_tensor, collectives.reduce_scatter(rows, op, _group(comm)))


def reduce_scatter_inplace(tensor: torch.Tensor, op: ReduceOp = ReduceOp.SUM, comm: Comm = None) -> None:
    """This member's part is written to the beginning of `tensor`."""
    members = _place(comm)[1]
    reduce_scatter(tensor, _leading(tensor, _rows(tensor, members).shape[1]), op, comm)


# -- moving tensors


def broadcast(tensor: torch.Tensor, src: int = 0, comm: Comm = None) -> None:
    """In place."""
    _fill(tensor, collectives.broadcast(tensor, src, _group(comm)))


def broadcast_object(obj: _Value, src: int = 0, comm: Comm = None) -> _Value:
    """A copy of rank src's value: numbers, strings, containers, tensors; no pickle travels (StateCodecError)."""
    return collectives.broadcast_object(obj, src, _group(comm))


def allgather(send_tensor: torch.Tensor, recv_tensor: torch.Tensor, comm: Comm = None) -> None:
    """recv_tensor: all members' send_tensor, by rank."""
    _fill(recv_tensor, collectives.allgather(send_tensor, _group(comm)))


def allgather_inplace(tensor: torch.Tensor, comm: Comm = None) -> None:
    """Each member brings its part of `tensor` and gets the others'."""
    rank, members = _place(comm)
    allgather(_rows(tensor, members)[rank], tensor, comm)


def gather(send_tensor: torch.Tensor, recv_tensor: torch.Tensor, dst: int, comm: Comm = None) -> None:
    """As allgather; recv_tensor is written on rank `dst` alone."""
    result = collectives.gather(send_tensor, dst, _group(comm))
    if result is not None:
        _fill(recv_tensor, result)


def gather_inplace(tensor: torch.Tensor, count: int, dst: int, comm: Comm = None) -> None:
    """count: elements of each member. On `dst` the tensor has room for all, and its own are at its place among them;
    elsewhere they are at the beginning."""
    rank, members = _place(comm)
    if rank != dst:
        gather(_leading(tensor, count), tensor, dst, comm)
        return
    room = _leading(tensor, members * count)
    gather(room.view(members, count)[rank], room, dst, comm)


def scatter(send_tensor: torch.Tensor, recv_tensor: torch.Tensor, src: int, comm: Comm = None) -> None:
    """recv_tensor: this member's part of rank src's send_tensor, which is not looked at elsewhere."""
    rank, members = _place(comm)
    parts = _rows(send_tensor, members) if rank == src else None
    _fill(recv_tensor, collectives.scatter(recv_tensor.reshape(-1), parts, src, _group(comm)))


def scatter_inplace(tensor: torch.Tensor, count: int, src: int, comm: Comm = None) -> None:
    """count: elements of each member. On `src` the tensor holds all, and stays as it is; elsewhere the part arrives at
    its beginning."""
    rank, members = _place(comm)
    if rank != src:
        scatter(tensor, _leading(tensor, count), src, comm)
        return
    parts = _leading(tensor, members * count)
    scatter(parts, torch.empty_like(parts[:count]), src, comm)


def alltoall(send_tensor: torch.Tensor, recv_tensor: torch.Tensor, comm: Comm = None) -> None:
    """Part r of send_tensor goes to rank r; part r of recv_tensor is what came from there."""
    rows = _rows(send_tensor, _place(comm)[1])
    _fill(recv_tensor, collectives.alltoall(rows, _group(comm)))


def alltoall_inplace(tensor: torch.Tensor, comm: Comm = None) -> None:
    alltoall(tensor, tensor, comm)


def alltoall_v(
    send_tensor: torch.Tensor,
    send_counts: Sequence[int],
    send_displs: Sequence[int],
    recv_tensor: torch.Tensor,
    recv_counts: Sequence[int],
    recv_displs: Sequence[int],
    comm: Comm = None,
) -> None:
    """send_counts[r] elements from send_displs[r] on go to rank r; recv_counts[r] from there lie at recv_displs[r].

    Raises ValueError if other counts arrive.
    """
    flat = send_tensor.reshape(-1)
    parts = [flat[at : at + n] for at, n in zip(send_displs, send_counts, strict=True)]
    arrived, counts = collectives.alltoall_v(torch.cat(parts), list(send_counts), _group(comm))
    if counts != list(recv_counts):
        raise ValueError(f"recv_counts={list(recv_counts)}, but {counts} elements arrived")
    room = _leading(recv_tensor, max(at + n for at, n in zip(recv_displs, recv_counts, strict=True)))
    with torch.no_grad():
        for at, part in zip(recv_displs, torch.split(arrived, counts), strict=True):
            room[at : at + part.numel()] = part


def alltoall_v_inplace(
    tensor: torch.Tensor, counts: Sequence[int], displs: Sequence[int], comm: Comm = None
) -> None:
    alltoall_v(tensor, counts, displs, tensor, counts, displs, comm)


# -- between two workers, and all


def send(tensor: torch.Tensor, dst: int, comm: Comm = None) -> None:
    collectives.send(tensor, dst, group=_group(comm))


def recv(tensor: torch.Tensor, src: int, comm: Comm = None) -> None:
    """Into `tensor`."""
    _fill(tensor, collectives.recv(tensor, src, group=_group(comm)))


def barrier(comm: Comm = None) -> None:
    """Return when every worker has called it."""
    collectives.barrier(_group(comm))
