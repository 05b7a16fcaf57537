"""Provides the collectives of one group in the original's form: the object that their `comm` argument takes.

Owns the layout of tensors: one that is sent, one that is received into, any shape, as many elements as all parts
together. What a collective does, and what a lost worker means for it, is bagua_core/collectives.py. Ranks are places in
the group.
Invariant: nothing is written if a collective raises.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from bagua_core import collectives
from bagua_core.communication.communicator import ReduceOp
from bagua_core.torch_api.errors import CommunicatorAborted
from bagua_core.torch_api.script_world import this_script

__all__ = ["GroupCommunicator"]

_Value = TypeVar("_Value")


class GroupCommunicator:
    """Runs collectives among the members of `group`. None: all workers, and it follows the job's membership."""

    def __init__(self, group: collectives.Group | None) -> None:
        self._group = group
        self._is_aborted = False

    @property
    def group(self) -> collectives.Group | None:
        """The group whose members take part; None: all workers. Raises CommunicatorAborted after abort()."""
        if self._is_aborted:
            raise CommunicatorAborted(
                "abort() was called on this communicator; make another with new_group()"
            )
        if self._group is None:
            this_script().world.join()
        return self._group

    def rank(self) -> int:
        """Returns this worker's place in the group."""
        return self._place()[0]

    def nranks(self) -> int:
        """Returns the number of members."""
        return self._place()[1]

    def device_id(self) -> int:
        """Returns the index of this worker's device on its node, as get_local_rank()."""
        return this_script().engine.local_rank

    def abort(self) -> None:
        """Refuses every further collective with CommunicatorAborted. One under way ends as it would have: the runtime
        itself ends what waits for a lost worker."""
        self._is_aborted = True

    def check_abort(self) -> bool:
        """Tells whether abort() was called."""
        return self._is_aborted

    def _place(self) -> tuple[int, int]:
        group = self.group
        if group is None:
            return this_script().engine.place_of_script()
        assert group.rank is not None  # others get no communicator
        return group.rank, group.size

    # -- reductions

    def allreduce(
        self, send_tensor: torch.Tensor, recv_tensor: torch.Tensor, op: ReduceOp = ReduceOp.SUM
    ) -> None:
        """Writes `op` over all members' send_tensor, elementwise, to recv_tensor, which has as many elements."""
        self._fill(recv_tensor, collectives.allreduce(send_tensor, op, self.group))

    def allreduce_inplace(self, tensor: torch.Tensor, op: ReduceOp = ReduceOp.SUM) -> None:
        """Writes `op` over all members' `tensor` to `tensor`."""
        self.allreduce(tensor, tensor, op)

    def reduce(
        self, send_tensor: torch.Tensor, recv_tensor: torch.Tensor, dst: int, op: ReduceOp = ReduceOp.SUM
    ) -> None:
        """Writes `op` over all members' send_tensor, elementwise, to recv_tensor on rank `dst` alone, where it has as
        many elements."""
        result = collectives.reduce(send_tensor, dst, op, self.group)
        if result is not None:
            self._fill(recv_tensor, result)

    def reduce_inplace(self, tensor: torch.Tensor, dst: int, op: ReduceOp = ReduceOp.SUM) -> None:
        """Writes `op` over all members' `tensor` to `tensor` on rank `dst` alone."""
        self.reduce(tensor, tensor, dst, op)

    def reduce_scatter(
        self, send_tensor: torch.Tensor, recv_tensor: torch.Tensor, op: ReduceOp = ReduceOp.SUM
    ) -> None:
        """Writes this member's part of `op` over all members' send_tensor to recv_tensor.

        send_tensor: as many equal parts as members, by rank.
        recv_tensor: the elements of one part.
        """
        self._fill(recv_tensor, collectives.reduce_scatter(self._rows(send_tensor), op, self.group))

    def reduce_scatter_inplace(self, tensor: torch.Tensor, op: ReduceOp = ReduceOp.SUM) -> None:
        """Writes this member's part of `op` over all members' `tensor` to the beginning of `tensor`."""
        self.reduce_scatter(tensor, _leading(tensor, self._rows(tensor).shape[1]), op)

    def allreduce_coalesced_inplace(
        self, tensors: Sequence[torch.Tensor], op: ReduceOp = ReduceOp.SUM
    ) -> None:
        """Writes `op` over all members' tensors to each of `tensors`, in one message for each data type."""
        _coalesced(tensors, lambda flat: self.allreduce_inplace(flat, op))

    # -- moving tensors

    def broadcast(self, tensor: torch.Tensor, src: int = 0) -> None:
        """Writes rank src's `tensor` to `tensor` on every member."""
        self._fill(tensor, collectives.broadcast(tensor, src, self.group))

    def broadcast_coalesced(self, tensors: Sequence[torch.Tensor], src: int = 0) -> None:
        """Writes rank src's `tensors` to `tensors` on every member, in one message for each data type."""
        _coalesced(tensors, lambda flat: self.broadcast(flat, src))

    def broadcast_object(self, obj: _Value, src: int = 0) -> _Value:
        """Returns a copy of rank src's `obj`; see the function of this name."""
        return collectives.broadcast_object(obj, src, self.group)

    def allgather(self, send_tensor: torch.Tensor, recv_tensor: torch.Tensor) -> None:
        """Writes all members' send_tensor, by rank, to recv_tensor, which has the elements of all together."""
        self._fill(recv_tensor, collectives.allgather(send_tensor, self.group))

    def allgather_inplace(self, tensor: torch.Tensor) -> None:
        """Sends this member's part of `tensor` to all members, and fills the other parts with theirs."""
        self.allgather(self._rows(tensor)[self.rank()], tensor)

    def gather(self, send_tensor: torch.Tensor, recv_tensor: torch.Tensor, dst: int) -> None:
        """Writes all members' send_tensor, by rank, to recv_tensor on rank `dst` alone, where it has the elements of
        all together."""
        result = collectives.gather(send_tensor, dst, self.group)
        if result is not None:
            self._fill(recv_tensor, result)

    def gather_inplace(self, tensor: torch.Tensor, count: int, dst: int) -> None:
        """Gathers `count` elements of each member on rank `dst`. There the tensor has room for all, and its own are at
        its place among them; elsewhere they are at the beginning."""
        rank, members = self._place()
        if rank != dst:
            self.gather(_leading(tensor, count), tensor, dst)
            return
        room = _leading(tensor, members * count)
        self.gather(room.view(members, count)[rank], room, dst)

    def scatter(self, send_tensor: torch.Tensor, recv_tensor: torch.Tensor, src: int) -> None:
        """Writes this member's part of rank src's send_tensor, which is ignored elsewhere, to recv_tensor.

        send_tensor: on rank `src` as many equal parts as members, by rank.
        recv_tensor: the elements of one part.
        """
        parts = self._rows(send_tensor) if self.rank() == src else None
        self._fill(recv_tensor, collectives.scatter(recv_tensor.reshape(-1), parts, src, self.group))

    def scatter_inplace(self, tensor: torch.Tensor, count: int, src: int) -> None:
        """Scatters `count` elements to each member from rank `src`. There the tensor holds all, and stays as it is;
        elsewhere the part arrives at its beginning."""
        rank, members = self._place()
        if rank != src:
            self.scatter(tensor, _leading(tensor, count), src)
            return
        parts = _leading(tensor, members * count)
        self.scatter(parts, torch.empty_like(parts[:count]), src)

    def alltoall(self, send_tensor: torch.Tensor, recv_tensor: torch.Tensor) -> None:
        """Sends part r of send_tensor to rank r, and writes what came from rank r to part r of recv_tensor. Both have
        as many equal parts as members."""
        self._fill(recv_tensor, collectives.alltoall(self._rows(send_tensor), self.group))

    def alltoall_inplace(self, tensor: torch.Tensor) -> None:
        """Sends part r of `tensor` to rank r, and writes what came from rank r to that part."""
        self.alltoall(tensor, tensor)

    def alltoall_v(
        self,
        send_tensor: torch.Tensor,
        send_counts: Sequence[int],
        send_displs: Sequence[int],
        recv_tensor: torch.Tensor,
        recv_counts: Sequence[int],
        recv_displs: Sequence[int],
    ) -> None:
        """Sends send_counts[r] elements of send_tensor from send_displs[r] on to rank r; writes recv_counts[r] from
        there to recv_tensor at recv_displs[r].

        Displacements may have one entry more, the end of the last part, as in the original's examples.
        Raises ValueError if other counts arrive.
        """
        members = self.nranks()
        leaving = _cut("send", members, send_counts, send_displs)
        arriving = _cut("recv", members, recv_counts, recv_displs)
        flat = send_tensor.reshape(-1)
        parts = [flat[at : at + n] for at, n in leaving]
        arrived, counts = collectives.alltoall_v(torch.cat(parts), [n for _, n in leaving], self.group)
        if counts != [n for _, n in arriving]:
            raise ValueError(f"recv_counts={[n for _, n in arriving]}, but {counts} elements arrived")
        room = _leading(recv_tensor, max(at + n for at, n in arriving))
        with torch.no_grad():
            for (at, n), part in zip(arriving, torch.split(arrived, counts), strict=True):
                room[at : at + n] = part

    def alltoall_v_inplace(self, tensor: torch.Tensor, counts: Sequence[int], displs: Sequence[int]) -> None:
        """Runs alltoall_v within `tensor`: what comes from a rank replaces what goes there.

        counts: elements for and from each rank.
        displs: where they begin in `tensor`.
        """
        self.alltoall_v(tensor, counts, displs, tensor, counts, displs)

    # -- between two workers, and all

    def send(self, tensor: torch.Tensor, dst: int) -> None:
        """Sends `tensor` to rank `dst`, which calls recv."""
        collectives.send(tensor, dst, group=self.group)

    def recv(self, tensor: torch.Tensor, src: int) -> None:
        """Receives what rank `src` sends into `tensor`."""
        self._fill(tensor, collectives.recv(tensor, src, group=self.group))

    def barrier(self) -> None:
        """Returns when every member has called it."""
        collectives.barrier(self.group)

    # -- layout

    def _fill(self, received: torch.Tensor, result: torch.Tensor) -> None:
        """Copies `result` to `received`. Raises ValueError if they differ in number of elements."""
        if received.numel() != result.numel():
            raise ValueError(
                f"{result.numel()} elements arrived and recv_tensor has {received.numel()}; it needs as many as all "
                f"members' parts together, and there are {self.nranks()} members now"
            )
        with torch.no_grad():
            received.copy_(result.reshape(received.shape))

    def _rows(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns `tensor` as [members, elements of each]. Raises ValueError if it can't be split evenly."""
        members = self.nranks()
        if tensor.numel() % members:
            raise ValueError(
                f"a tensor of {tensor.numel()} elements can't be split evenly among {members} members"
            )
        return tensor.reshape(members, -1)


def _leading(tensor: torch.Tensor, count: int) -> torch.Tensor:
    """Returns the first `count` elements of `tensor`, as a view. Raises ValueError."""
    if not tensor.is_contiguous() or tensor.numel() < count:
        raise ValueError(
            f"{count} elements are needed at the beginning of a contiguous tensor, not {tuple(tensor.shape)}"
        )
    return tensor.view(-1)[:count]


def _cut(what: str, members: int, counts: Sequence[int], displs: Sequence[int]) -> list[tuple[int, int]]:
    """Returns (displacement, count) of each member's part. Raises ValueError."""
    if len(counts) != members or len(displs) not in (members, members + 1):
        raise ValueError(
            f"{what}_counts has {len(counts)} entries and {what}_displs {len(displs)}; each needs one for each of the "
            f"{members} members (displacements may end with the end of the last part)"
        )
    return [(int(at), int(n)) for at, n in zip(displs, counts, strict=False)]


def _coalesced(tensors: Sequence[torch.Tensor], act: Callable[[torch.Tensor], None]) -> None:
    """Runs `act` on all `tensors` of one data type at a time, flattened into one, and writes the results back."""
    by_type: dict[torch.dtype, list[torch.Tensor]] = {}
    for tensor in tensors:
        by_type.setdefault(tensor.dtype, []).append(tensor)
    with torch.no_grad():
        for alike in by_type.values():
            flat = torch.cat([tensor.reshape(-1) for tensor in alike])
            act(flat)
            for tensor, part in zip(alike, torch.split(flat, [t.numel() for t in alike]), strict=True):
                tensor.copy_(part.view_as(tensor))
