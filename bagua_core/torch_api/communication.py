"""Collectives in the form that scripts of the original call them: one tensor that is sent, one that is received into.

Owns init_process_group, who a worker is, and the order of arguments. Tensors may lie on the CPU. Ranks are those of
get_rank(), within a group those of the group. Outside its group a worker returns at once, as in the original.
The layout of tensors is group_communicator.py, groups are process_group.py.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from bagua_contract.environment import WorkerEnvironment
from bagua_core.communication.communicator import ReduceOp
from bagua_core.torch_api import torch_default_group
from bagua_core.torch_api.absent_names import absent_from
from bagua_core.torch_api.process_group import (
    BaguaProcessGroup,
    Comm,
    CommMember,
    _get_default_group,
    comm,
    from_torch_group,
    get_communicator,
    is_initialized,
    member_of,
    new_group,
)
from bagua_core.torch_api.script_world import this_script

__all__ = [
    "BaguaProcessGroup",
    "CommMember",
    "ReduceOp",
    "_get_default_group",
    "allgather",
    "allgather_inplace",
    "allreduce",
    "allreduce_coalesced_inplace",
    "allreduce_inplace",
    "alltoall",
    "alltoall_inplace",
    "alltoall_v",
    "alltoall_v_inplace",
    "barrier",
    "broadcast",
    "broadcast_coalesced",
    "broadcast_object",
    "comm",
    "from_torch_group",
    "gather",
    "gather_inplace",
    "get_communicator",
    "get_local_rank",
    "get_local_size",
    "get_rank",
    "get_world_size",
    "init_process_group",
    "is_initialized",
    "new_group",
    "recv",
    "reduce",
    "reduce_inplace",
    "reduce_scatter",
    "reduce_scatter_inplace",
    "scatter",
    "scatter_inplace",
    "send",
]

_Value = TypeVar("_Value")
__getattr__: Callable[[str], object] = absent_from(__name__)


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
    torch_default_group.take_over()
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


# -- reductions: see GroupCommunicator's methods


def allreduce(
    send_tensor: torch.Tensor, recv_tensor: torch.Tensor, op: ReduceOp = ReduceOp.SUM, comm: Comm = None
) -> None:
    """recv_tensor: `op` over all members' send_tensor."""
    if (member := member_of(comm)) is not None:
        member.allreduce(send_tensor, recv_tensor, op)


def allreduce_inplace(tensor: torch.Tensor, op: ReduceOp = ReduceOp.SUM, comm: Comm = None) -> None:
    if (member := member_of(comm)) is not None:
        member.allreduce_inplace(tensor, op)


def allreduce_coalesced_inplace(
    tensors: Sequence[torch.Tensor], op: ReduceOp = ReduceOp.SUM, comm: Comm = None
) -> None:
    """As allreduce_inplace of each, in one message for each data type."""
    if (member := member_of(comm)) is not None:
        member.allreduce_coalesced_inplace(tensors, op)


def reduce(
    send_tensor: torch.Tensor,
    recv_tensor: torch.Tensor,
    dst: int,
    op: ReduceOp = ReduceOp.SUM,
    comm: Comm = None,
) -> None:
    """As allreduce; recv_tensor is written on rank `dst` alone."""
    if (member := member_of(comm)) is not None:
        member.reduce(send_tensor, recv_tensor, dst, op)


def reduce_inplace(tensor: torch.Tensor, dst: int, op: ReduceOp = ReduceOp.SUM, comm: Comm = None) -> None:
    if (member := member_of(comm)) is not None:
        member.reduce_inplace(tensor, dst, op)


def reduce_scatter(
    send_tensor: torch.Tensor, recv_tensor: torch.Tensor, op: ReduceOp = ReduceOp.SUM, comm: Comm = None
) -> None:
    """recv_tensor: this member's part of `op` over all members' send_tensor."""
    if (member := member_of(comm)) is not None:
        member.reduce_scatter(send_tensor, recv_tensor, op)


def reduce_scatter_inplace(tensor: torch.Tensor, op: ReduceOp = ReduceOp.SUM, comm: Comm = None) -> None:
    """This member's part is written to the beginning of `tensor`."""
    if (member := member_of(comm)) is not None:
        member.reduce_scatter_inplace(tensor, op)


# -- moving tensors


def broadcast(tensor: torch.Tensor, src: int = 0, comm: Comm = None) -> None:
    """In place."""
    if (member := member_of(comm)) is not None:
        member.broadcast(tensor, src)


def broadcast_coalesced(tensors: Sequence[torch.Tensor], src: int = 0, comm: Comm = None) -> None:
    """As broadcast of each, in one message for each data type."""
    if (member := member_of(comm)) is not None:
        member.broadcast_coalesced(tensors, src)


def broadcast_object(obj: _Value, src: int = 0, comm: Comm = None) -> _Value:
    """A copy of rank src's value: numbers, strings, containers, tensors; no pickle travels (StateCodecError)."""
    member = member_of(comm)
    return obj if member is None else member.broadcast_object(obj, src)


def allgather(send_tensor: torch.Tensor, recv_tensor: torch.Tensor, comm: Comm = None) -> None:
    """recv_tensor: all members' send_tensor, by rank."""
    if (member := member_of(comm)) is not None:
        member.allgather(send_tensor, recv_tensor)


def allgather_inplace(tensor: torch.Tensor, comm: Comm = None) -> None:
    """Each member brings its part of `tensor` and gets the others'."""
    if (member := member_of(comm)) is not None:
        member.allgather_inplace(tensor)


def gather(send_tensor: torch.Tensor, recv_tensor: torch.Tensor, dst: int, comm: Comm = None) -> None:
    """As allgather; recv_tensor is written on rank `dst` alone."""
    if (member := member_of(comm)) is not None:
        member.gather(send_tensor, recv_tensor, dst)


def gather_inplace(tensor: torch.Tensor, count: int, dst: int, comm: Comm = None) -> None:
    """count: elements of each member. See GroupCommunicator.gather_inplace."""
    if (member := member_of(comm)) is not None:
        member.gather_inplace(tensor, count, dst)


def scatter(send_tensor: torch.Tensor, recv_tensor: torch.Tensor, src: int, comm: Comm = None) -> None:
    """recv_tensor: this member's part of rank src's send_tensor, which is not looked at elsewhere."""
    if (member := member_of(comm)) is not None:
        member.scatter(send_tensor, recv_tensor, src)


def scatter_inplace(tensor: torch.Tensor, count: int, src: int, comm: Comm = None) -> None:
    """count: elements of each member. See GroupCommunicator.scatter_inplace."""
    if (member := member_of(comm)) is not None:
        member.scatter_inplace(tensor, count, src)


def alltoall(send_tensor: torch.Tensor, recv_tensor: torch.Tensor, comm: Comm = None) -> None:
    """Part r of send_tensor goes to rank r; part r of recv_tensor is what came from there."""
    if (member := member_of(comm)) is not None:
        member.alltoall(send_tensor, recv_tensor)


def alltoall_inplace(tensor: torch.Tensor, comm: Comm = None) -> None:
    if (member := member_of(comm)) is not None:
        member.alltoall_inplace(tensor)


def alltoall_v(
    send_tensor: torch.Tensor,
    send_counts: Sequence[int],
    send_displs: Sequence[int],
    recv_tensor: torch.Tensor,
    recv_counts: Sequence[int],
    recv_displs: Sequence[int],
    comm: Comm = None,
) -> None:
    """send_counts[r] elements from send_displs[r] on go to rank r; see GroupCommunicator.alltoall_v."""
    if (member := member_of(comm)) is not None:
        member.alltoall_v(send_tensor, send_counts, send_displs, recv_tensor, recv_counts, recv_displs)


def alltoall_v_inplace(
    tensor: torch.Tensor, counts: Sequence[int], displs: Sequence[int], comm: Comm = None
) -> None:
    if (member := member_of(comm)) is not None:
        member.alltoall_v_inplace(tensor, counts, displs)


# -- between two workers, and all


def send(tensor: torch.Tensor, dst: int, comm: Comm = None) -> None:
    if (member := member_of(comm)) is not None:
        member.send(tensor, dst)


def recv(tensor: torch.Tensor, src: int, comm: Comm = None) -> None:
    """Into `tensor`."""
    if (member := member_of(comm)) is not None:
        member.recv(tensor, src)


def barrier(comm: Comm = None) -> None:
    """Return when every member has called it."""
    if (member := member_of(comm)) is not None:
        member.barrier()
