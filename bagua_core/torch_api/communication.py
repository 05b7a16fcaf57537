"""Provides collectives in the form of the original: one tensor that is sent, one that is received into.

Owns init_process_group, the functions for a worker's ranks, and the order of arguments. Tensors may lie on the CPU.
Ranks are those of get_rank(), within a group those of the group. Outside its group a worker returns at once, as in the
original. The layout of tensors is group_communicator.py, groups are process_group.py.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from typing import Any, TypeVar

from bagua_contract.environment import WorkerEnvironment
from bagua_core.communication.communicator import ReduceOp
from bagua_core.elastic.replica.refusals import NotForReplicas
from bagua_core.torch_api import torch_default_group
from bagua_core.torch_api.group_communicator import GroupCommunicator
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
_COMM = """
comm: a communicator or group; None or comm.WORLD: all workers.

Raises PeerLostError if a worker of a group that new_group() made is lost, TypeError for another `comm`, and ValueError
if a tensor has another number of elements than was received.
"""


def init_process_group(
    store: Any = None,
    rank: int = -1,
    world_size: int = -1,
    local_world_size: int = -1,
    elastic: bool = False,
) -> None:
    """Joins the job, or under plain `python` a world of one. From now on ranks and world size are known.

    store, rank, world_size, local_world_size: the job decides them; those given must agree with it. elastic: the script
    draws from ElasticDataLoader or calls next_step(), so workers may come and go, and ranks are known from the first
    step on (see docs/original-scripts.md). Raises ValueError, NotLaunchedError, LateWorkerError.
    """
    if store is not None:
        raise ValueError("store: workers meet through bagua-launch; leave it out")
    script = this_script()
    if script.engine.replica_size_asked > 1:
        raise NotForReplicas(
            f"bagua.torch_api in a job with --replica-size {script.engine.replica_size_asked}: inside a replica "
            "torch's default process group is the replica's; import bagua_core and call its init_process_group()"
        )
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
    """Returns the global rank of this worker; it may change when a worker is lost."""
    script = this_script()
    script.world.join()
    return script.engine.asked_place()[0]


def get_world_size() -> int:
    """Returns the number of workers that the job has now."""
    script = this_script()
    script.world.join()
    return script.engine.asked_size()


def get_local_rank() -> int:
    """Returns the index of this worker's device on its node; fixed for the life of the process. 0 under
    --virtual-local-rank."""
    return this_script().engine.local_rank


def get_local_size() -> int:
    """Returns the number of slots on this node; 1 outside a job."""
    if not WorkerEnvironment.is_present(os.environ):
        return 1
    return WorkerEnvironment.decode(os.environ).slots


# -- the collectives


def _with_comm(method: Callable[..., None]) -> Callable[..., None]:
    """Returns a function that calls `method` on the communicator that its last argument `comm` means, by default all
    workers."""
    own = inspect.signature(method)
    comm_argument = inspect.Parameter("comm", inspect.Parameter.POSITIONAL_OR_KEYWORD, default=None)
    whole = own.replace(parameters=[*list(own.parameters.values())[1:], comm_argument])

    def call(*args: Any, **kwargs: Any) -> None:
        arguments = whole.bind(*args, **kwargs).arguments
        member = member_of(arguments.pop("comm", None))
        if member is not None:
            method(member, **arguments)

    call.__name__ = call.__qualname__ = method.__name__
    call.__doc__ = f"{inspect.cleandoc(method.__doc__ or '')}\n{_COMM}"
    call.__signature__ = whole  # type: ignore[attr-defined]
    return call


allreduce = _with_comm(GroupCommunicator.allreduce)
allreduce_inplace = _with_comm(GroupCommunicator.allreduce_inplace)
allreduce_coalesced_inplace = _with_comm(GroupCommunicator.allreduce_coalesced_inplace)
reduce = _with_comm(GroupCommunicator.reduce)
reduce_inplace = _with_comm(GroupCommunicator.reduce_inplace)
reduce_scatter = _with_comm(GroupCommunicator.reduce_scatter)
reduce_scatter_inplace = _with_comm(GroupCommunicator.reduce_scatter_inplace)
broadcast = _with_comm(GroupCommunicator.broadcast)
broadcast_coalesced = _with_comm(GroupCommunicator.broadcast_coalesced)
allgather = _with_comm(GroupCommunicator.allgather)
allgather_inplace = _with_comm(GroupCommunicator.allgather_inplace)
gather = _with_comm(GroupCommunicator.gather)
gather_inplace = _with_comm(GroupCommunicator.gather_inplace)
scatter = _with_comm(GroupCommunicator.scatter)
scatter_inplace = _with_comm(GroupCommunicator.scatter_inplace)
alltoall = _with_comm(GroupCommunicator.alltoall)
alltoall_inplace = _with_comm(GroupCommunicator.alltoall_inplace)
alltoall_v = _with_comm(GroupCommunicator.alltoall_v)
alltoall_v_inplace = _with_comm(GroupCommunicator.alltoall_v_inplace)
send = _with_comm(GroupCommunicator.send)
recv = _with_comm(GroupCommunicator.recv)
barrier = _with_comm(GroupCommunicator.barrier)


def broadcast_object(obj: _Value, src: int = 0, comm: Comm = None) -> _Value:
    """Returns a copy of rank src's `obj`: numbers, strings, containers, tensors. No pickle is sent.

    comm: as for broadcast. Raises StateCodecError for a value of another type, PeerLostError.
    """
    member = member_of(comm)
    return obj if member is None else member.broadcast_object(obj, src)
