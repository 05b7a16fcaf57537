"""Provides torch.distributed's collectives, with its arguments and order, as collectives of the job's workers.

Owns the translation of arguments: torch's operations, its lists of tensors, ranks within a group. When these functions
are in torch's namespace is torch_default_group.py. With async_op the operation is over when the call returns. A worker
outside `group` returns at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from bagua_core import collectives
from bagua_core.communication.communicator import ReduceOp
from bagua_core.torch_api.group_communicator import GroupCommunicator
from bagua_core.torch_api.process_group import BaguaProcessGroup, member_of


class Done:
    """The return value for async_op=True: an operation that is already complete."""

    def wait(self, timeout: Any = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True


def _run(group: Any, async_op: bool, act: Callable[[GroupCommunicator], None]) -> Done | None:
    """Runs `act` on this worker's communicator of `group`. A worker outside `group` returns at once."""
    member = member_of(group)
    if member is not None:
        act(member)
    return Done() if async_op else None


_OPERATIONS = ("SUM", "AVG", "MIN", "MAX", "PRODUCT", "BOR", "BAND", "BXOR")


def _op(op: Any) -> ReduceOp:
    """Returns torch's operation as this runtime's. Raises ValueError."""
    if isinstance(op, ReduceOp):
        return op
    for name in _OPERATIONS:
        if op == getattr(dist.ReduceOp, name):
            return ReduceOp[name]
    raise ValueError(f"op={op}: use one of {', '.join(_OPERATIONS)}")


def _place(group: Any, global_rank: int | None, group_rank: int | None, default: int | None = 0) -> int:
    """Returns the peer's rank within `group`; torch's calls name that or the global rank. Raises ValueError."""
    if group_rank is not None:
        return group_rank
    named = default if global_rank is None else global_rank
    if named is None:
        raise ValueError("no peer is named; pass dst or src: sending to or receiving from any is not offered")
    if not isinstance(group, BaguaProcessGroup) or group.group is None:
        return named
    if named not in group.ranks:
        raise ValueError(f"rank {named} is not in the group of the ranks {group.ranks}")
    return group.ranks.index(named)


def barrier(group: Any = None, async_op: bool = False, device_ids: Any = None, timeout: Any = None) -> Any:
    return _run(group, async_op, lambda member: member.barrier())


def monitored_barrier(group: Any = None, timeout: Any = None, wait_all_ranks: bool = False) -> None:
    _run(group, False, lambda member: member.barrier())


def broadcast(
    tensor: torch.Tensor,
    src: int | None = None,
    group: Any = None,
    async_op: bool = False,
    group_src: int | None = None,
) -> Any:
    return _run(group, async_op, lambda member: member.broadcast(tensor, _place(group, src, group_src)))


def all_reduce(
    tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False
) -> Any:
    return _run(group, async_op, lambda member: member.allreduce_inplace(tensor, _op(op)))


def reduce(
    tensor: torch.Tensor,
    dst: int | None = None,
    op: Any = dist.ReduceOp.SUM,
    group: Any = None,
    async_op: bool = False,
    group_dst: int | None = None,
) -> Any:
    return _run(
        group, async_op, lambda member: member.reduce_inplace(tensor, _place(group, dst, group_dst), _op(op))
    )


def all_gather(
    tensor_list: Sequence[torch.Tensor], tensor: torch.Tensor, group: Any = None, async_op: bool = False
) -> Any:
    return _run(
        group, async_op, lambda member: _write_each(tensor_list, collectives.allgather(tensor, member.group))
    )


def all_gather_into_tensor(
    output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any = None, async_op: bool = False
) -> Any:
    return _run(group, async_op, lambda member: member.allgather(input_tensor, output_tensor))


def gather(
    tensor: torch.Tensor,
    gather_list: Sequence[torch.Tensor] | None = None,
    dst: int | None = None,
    group: Any = None,
    async_op: bool = False,
    group_dst: int | None = None,
) -> Any:
    def act(member: GroupCommunicator) -> None:
        rows = collectives.gather(tensor, _place(group, dst, group_dst), member.group)
        if rows is not None:
            _write_each(gather_list or (), rows)

    return _run(group, async_op, act)


def scatter(
    tensor: torch.Tensor,
    scatter_list: Sequence[torch.Tensor] | None = None,
    src: int | None = None,
    group: Any = None,
    async_op: bool = False,
    group_src: int | None = None,
) -> Any:
    def act(member: GroupCommunicator) -> None:
        parts = torch.stack(list(scatter_list)) if scatter_list else None
        tensor.copy_(collectives.scatter(tensor, parts, _place(group, src, group_src), member.group))

    return _run(group, async_op, torch.no_grad()(act))


def reduce_scatter(
    output: torch.Tensor,
    input_list: Sequence[torch.Tensor],
    op: Any = dist.ReduceOp.SUM,
    group: Any = None,
    async_op: bool = False,
) -> Any:
    return _run(
        group, async_op, lambda member: member.reduce_scatter(torch.stack(list(input_list)), output, _op(op))
    )


def reduce_scatter_tensor(
    output: torch.Tensor,
    input: torch.Tensor,
    op: Any = dist.ReduceOp.SUM,
    group: Any = None,
    async_op: bool = False,
) -> Any:
    return _run(group, async_op, lambda member: member.reduce_scatter(input, output, _op(op)))


def all_to_all(
    output_tensor_list: Sequence[torch.Tensor],
    input_tensor_list: Sequence[torch.Tensor],
    group: Any = None,
    async_op: bool = False,
) -> Any:
    def act(member: GroupCommunicator) -> None:
        sent = torch.cat([tensor.reshape(-1) for tensor in input_tensor_list])
        arrived, counts = collectives.alltoall_v(sent, [t.numel() for t in input_tensor_list], member.group)
        _write_each(output_tensor_list, torch.split(arrived, counts))

    return _run(group, async_op, act)


def all_to_all_single(
    output: torch.Tensor,
    input: torch.Tensor,
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    group: Any = None,
    async_op: bool = False,
) -> Any:
    """Exchanges rows of `input` among all members into `output`. Splits count rows; without any, all parts are
    equal."""

    def act(member: GroupCommunicator) -> None:
        if not input_split_sizes and not output_split_sizes:
            member.alltoall(input, output)
            return
        members = member.nranks()
        splits = list(input_split_sizes or [len(input) // members] * members)
        expected = list(output_split_sizes or [len(output) // members] * members)
        rows, counts = collectives.alltoall_v(input, splits, member.group)
        if counts != expected:
            raise ValueError(f"output_split_sizes={expected}, but {counts} rows arrived")
        output.copy_(rows.view_as(output))

    return _run(group, async_op, torch.no_grad()(act))


def broadcast_object_list(
    object_list: list[Any],
    src: int | None = None,
    group: Any = None,
    device: Any = None,
    group_src: int | None = None,
) -> None:
    """Replaces the values of object_list by rank src's. No pickle travels; see bagua.broadcast_object."""

    def act(member: GroupCommunicator) -> None:
        object_list[:] = member.broadcast_object(object_list, _place(group, src, group_src))

    _run(group, False, act)


def all_gather_object(object_list: list[Any], obj: Any, group: Any = None) -> None:
    """Replaces the values of object_list by all members' `obj`. No pickle travels; see bagua.broadcast_object."""

    def act(member: GroupCommunicator) -> None:
        object_list[:] = [member.broadcast_object(obj, source) for source in range(member.nranks())]

    _run(group, False, act)


def send(
    tensor: torch.Tensor,
    dst: int | None = None,
    group: Any = None,
    tag: int = 0,
    group_dst: int | None = None,
) -> None:
    peer = _place(group, dst, group_dst, None)
    _run(group, False, lambda member: collectives.send(tensor, peer, tag, member.group))


def recv(
    tensor: torch.Tensor,
    src: int | None = None,
    group: Any = None,
    tag: int = 0,
    group_src: int | None = None,
) -> int:
    """Receives into `tensor` and returns the sender's global rank, as torch does; -1 for a worker outside `group`.
    Raises ValueError if no sender is named."""
    peer = _place(group, src, group_src, None)
    member = member_of(group)
    if member is None:
        return -1
    collectives.recv_inplace(tensor, peer, tag, member.group)
    if src is not None:
        return src
    return group.ranks[peer] if isinstance(group, BaguaProcessGroup) else peer


def _write_each(tensors: Sequence[torch.Tensor], results: Sequence[torch.Tensor] | torch.Tensor) -> None:
    """Copies each result to its tensor. Raises ValueError if they are not as many, or of other sizes."""
    if len(tensors) != len(results):
        raise ValueError(
            f"{len(results)} parts arrived for {len(tensors)} tensors; there must be one for each member"
        )
    with torch.no_grad():
        for tensor, result in zip(tensors, results, strict=True):
            tensor.copy_(result.view_as(tensor))
