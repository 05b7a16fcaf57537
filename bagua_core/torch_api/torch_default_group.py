"""Answers torch.distributed's calls on the default group in a script of the original, where torch has no such group.

The original made torch's default group in init_process_group(), so its scripts call torch.distributed.barrier(),
DistributedSampler(dataset) or dist.all_reduce(). A group of torch's own can't follow the job's membership. take_over()
therefore replaces the functions of `REPLACED` in the namespace torch.distributed by this surface's collectives;
give_back() undoes it, and destroy_process_group() calls that. torch.distributed.distributed_c10d is left alone, so what
torch calls internally, and a function that was imported by name before, are torch's own. Importing this module changes
nothing. What the collectives do is torch_calls.py.
"""

from __future__ import annotations

import atexit
import functools
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from bagua_contract.environment import WorkerEnvironment
from bagua_core.communication.reduction.hook_group import HookGroup
from bagua_core.elastic.script_collectives import default_group
from bagua_core.elastic.step import runtime
from bagua_core.torch_api import torch_calls
from bagua_core.torch_api.process_group import BaguaProcessGroup, member_of, new_group

# what was replaced; empty before take_over and after give_back
_torchs_own: dict[str, Callable[..., Any]] = {}
_owner_pid = 0


def take_over() -> None:
    """Replaces the functions. In a job, a default group that the script has made by itself stays unused from now on; in
    a world of one it is left to torch. Doing it twice is harmless."""
    global _owner_pid
    if _torchs_own or not dist.is_available():
        return
    if default_group.is_made():
        if not WorkerEnvironment.is_present(os.environ):
            return
        default_group.set_aside()
    _owner_pid = os.getpid()
    for name, function in REPLACED.items():
        _torchs_own[name] = getattr(dist, name)
        setattr(dist, name, function)
    atexit.register(give_back)
    runtime.at_end_of_training(give_back)


def give_back() -> None:
    """Puts torch's own functions back where they were replaced."""
    global _owner_pid
    _owner_pid = 0
    atexit.unregister(give_back)
    for name, function in _torchs_own.items():
        setattr(dist, name, function)
    _torchs_own.clear()


# -- who is there


def is_initialized() -> bool:
    """Tells whether this process is the worker that replaced the functions. False in a child of the worker, such as a
    DataLoader process, which has no part in the job."""
    return os.getpid() == _owner_pid


def get_rank(group: Any = None) -> int:
    """Returns this worker's rank in `group`; -1 outside it."""
    member = member_of(group)
    return -1 if member is None else member.rank()


def get_world_size(group: Any = None) -> int:
    """Returns the number of members of `group`; -1 outside it."""
    member = member_of(group)
    return -1 if member is None else member.nranks()


def get_backend(group: Any = None) -> str:
    """Returns the backend of torch for the tensors that its users would bring: "nccl" if there is a GPU, else "gloo".
    The runtime takes those of the CPU and of GPUs with either."""
    return "nccl" if torch.cuda.is_available() else "gloo"


def init_process_group(*args: Any, rank: int = -1, world_size: int = -1, **kwargs: Any) -> None:
    """Checks the arguments alone, for the job is joined already. rank, world_size: if given, the job's. Raises
    ValueError."""
    for name, given, found in (("rank", rank, get_rank()), ("world_size", world_size, get_world_size())):
        if given not in (-1, found):
            raise ValueError(
                f"{name}={given}, but in this job it is {found}; leave torch.distributed.init_process_group out, "
                "bagua.init_process_group() decides it"
            )


def destroy_process_group(group: Any = None) -> None:
    """Puts torch's own functions back, if no `group` is given. The job goes on."""
    if group is not None:
        return
    give_back()
    if default_group.is_made():
        dist.destroy_process_group()
        default_group.set_aside()


def make_group(ranks: Sequence[int] | None = None, *args: Any, **kwargs: Any) -> BaguaProcessGroup:
    """Returns a new group, as torch.distributed.new_group. Backend, timeout and options are ignored."""
    return new_group(ranks)


def _refused(name: str, instead: str) -> Callable[..., Any]:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"torch.distributed.{name} after bagua.init_process_group(): {instead}")

    return refuse


def _beside_hooks(name: str) -> Callable[..., Any]:
    """Returns the function of this name in torch_calls.py; on a HookGroup, of a communication hook, it calls torch's
    own."""
    ours = getattr(torch_calls, name)

    @functools.wraps(ours)
    def call(*args: Any, **kwargs: Any) -> Any:
        of_hook = any(isinstance(given, HookGroup) for given in (*args, *kwargs.values()))
        return (_torchs_own[name] if of_hook else ours)(*args, **kwargs)

    return call


CALLS = (
    *(
        "barrier",
        "monitored_barrier",
        "broadcast",
        "all_reduce",
        "reduce",
        "all_gather",
        "all_gather_into_tensor",
        "gather",
    ),
    *("scatter", "reduce_scatter", "reduce_scatter_tensor", "all_to_all", "all_to_all_single"),
    *("broadcast_object_list", "all_gather_object", "send", "recv"),
)
"""Of torch_calls.py, under the same names."""
_BLOCKING = (
    "messages between two workers are sent and received one at a time; use send and recv in matching order"
)
_NO_PICKLE = "no pickle travels; use all_gather_object or broadcast_object_list with plain values"
REPLACED: dict[str, Callable[..., Any]] = {
    "is_initialized": is_initialized,
    "get_rank": get_rank,
    "get_world_size": get_world_size,
    "get_backend": get_backend,
    "init_process_group": init_process_group,
    "destroy_process_group": destroy_process_group,
    "new_group": make_group,
    **{name: getattr(torch_calls, name) for name in CALLS},
    **{name: _beside_hooks(name) for name in ("all_reduce", "broadcast")},
    "isend": _refused("isend", _BLOCKING),
    "irecv": _refused("irecv", _BLOCKING),
    "batch_isend_irecv": _refused("batch_isend_irecv", _BLOCKING),
    "gather_object": _refused("gather_object", _NO_PICKLE),
    "scatter_object_list": _refused("scatter_object_list", _NO_PICKLE),
}
