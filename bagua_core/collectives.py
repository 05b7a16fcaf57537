"""The public collectives that a script can call; see docs/collectives.md.

Most exist twice: `name` leaves its arguments alone and returns new tensors; `name_inplace` writes into its first
argument and returns it. No result carries a gradient. Ranks are those of get_rank(), and [members, ...] means
get_world_size() rows, or the size of `group`. Outside steps a collective of all workers follows the generation: if a
worker is lost meanwhile the others run it again from the input that was kept. Inside a step it is part of the step and
fails with it.

All raise ValueError or TypeError before any peer is asked, MismatchedCollective if workers ask for different ones, and
JobClosing outside steps if a worker is lost after the end of the training.
Between two steps a worker that has not taken its first one has no peers, and the rank behind the others. At the top of
an epoch it gets the results that the others had there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import torch

from bagua_core.communication.communicator import ReduceOp
from bagua_core.elastic.script_collectives.requests import (
    Allgather,
    AllgatherRows,
    Allreduce,
    Alltoall,
    AlltoallV,
    Barrier,
    Broadcast,
    BroadcastBytes,
    Gather,
    Receive,
    Reduce,
    ReduceScatter,
    Request,
    Result,
    Scatter,
    Send,
)
from bagua_core.elastic.script_collectives.worker_groups import WorkerGroup
from bagua_core.elastic.state import state_codec
from bagua_core.elastic.step import runtime

Group = WorkerGroup
_Value = TypeVar("_Value")


def new_group(ranks: Sequence[int] | None = None) -> Group:
    """Makes a group of the workers of `ranks` (default: all), for the `group` argument of the collectives.

    Makes no connection and sends nothing: the group connects at its first use, among its workers only. It stays good as
    long as all of them are in the job, whatever ranks they get, and once one is lost every use of it raises
    PeerLostError: make another when bagua.generation() has changed. A rank in the group is a place in the sorted
    `ranks`. Outside steps its collectives are not run again (see MembersChanged).
    Raises ValueError for ranks that there are not.
    """
    outside = runtime.engine().collectives
    return Group.of(None, "", ranks) if outside is None else outside.group(ranks)


def ask(request: Request, group: Group | None = None) -> Result:
    """Does `request` with its other members, and returns its result. In a world of one it has none."""
    outside = runtime.engine().collectives
    with torch.no_grad():
        if outside is not None:
            return outside.request(request, group)
        request.check(0, 1)
        return request.own(0, 1, 0)


def _write(tensor: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
    if result.shape != tensor.shape:
        raise ValueError(
            f"the result is {tuple(result.shape)} and does not fit into the {tuple(tensor.shape)} of its argument, for "
            "the members have changed meanwhile; use the variant that returns a new tensor"
        )
    with torch.no_grad():
        return tensor.copy_(result)


# -- reductions


def allreduce(tensor: torch.Tensor, op: ReduceOp = ReduceOp.SUM, group: Group | None = None) -> torch.Tensor:
    """Reduces all workers' tensors by `op`; the result has the same bits on every worker.

    tensor: any shape, the same on every worker. A worker in its first step counts with what changes nothing.
    group: the workers that take part; None: all. See new_group.
    Returns a new tensor of the same shape and dtype. Raises PeerLostError, MembersChanged for a group only; JobClosing.
    """
    return ask(Allreduce(tensor, op), group)[0]


def allreduce_inplace(
    tensor: torch.Tensor, op: ReduceOp = ReduceOp.SUM, group: Group | None = None
) -> torch.Tensor:
    """Writes the result of allreduce into `tensor`, and returns it. For `op` and `group` see allreduce."""
    return _write(tensor, allreduce(tensor, op, group))


def reduce(
    tensor: torch.Tensor, destination: int, op: ReduceOp = ReduceOp.SUM, group: Group | None = None
) -> torch.Tensor | None:
    """Reduces all workers' tensors by `op`, and returns the result on rank `destination`, None on the others.

    tensor: any shape, the same on every worker.
    group: the workers that take part; None: all. See new_group.
    Raises PeerLostError if that worker is lost before all have their part done.
    """
    return next(iter(ask(Reduce(tensor, op, root=destination), group)), None)


def reduce_inplace(
    tensor: torch.Tensor, destination: int, op: ReduceOp = ReduceOp.SUM, group: Group | None = None
) -> torch.Tensor:
    """Writes the result of reduce into `tensor` on rank `destination`, and returns `tensor`, which stays as it is on
    the other ranks. For `op` and `group` see reduce."""
    result = reduce(tensor, destination, op, group)
    return tensor if result is None else _write(tensor, result)


def reduce_scatter(
    tensor: torch.Tensor, op: ReduceOp = ReduceOp.SUM, group: Group | None = None
) -> torch.Tensor:
    """Reduces `tensor` over all workers, and returns row `rank` of the result.

    tensor: [members, ...], the same shape on every worker.
    op: how the workers' values become one, as for allreduce.
    group: the workers that take part; None: all. See new_group.
    Returns a tensor of the shape of a row.
    Raises PeerLostError if a worker is lost: its row would have no owner.
    """
    return ask(ReduceScatter(tensor, op), group)[0]


def reduce_scatter_inplace(
    tensor: torch.Tensor, op: ReduceOp = ReduceOp.SUM, group: Group | None = None
) -> torch.Tensor:
    """Writes the result of reduce_scatter to this worker's own row of `tensor`, and returns `tensor`; the other rows
    stay. For `op` and `group` see reduce_scatter."""
    _write(tensor[_own_row(tensor, group)], reduce_scatter(tensor, op, group))
    return tensor


# -- moving tensors


def broadcast(tensor: torch.Tensor, source: int = 0, group: Group | None = None) -> torch.Tensor:
    """Returns rank `source`'s tensor.

    tensor: of the same shape and dtype on every worker; its values count on the source only.
    group: the workers that take part; None: all. See new_group.
    Raises PeerLostError if the source is lost before another worker has it.
    """
    return ask(Broadcast(tensor, root=source), group)[0]


def broadcast_inplace(tensor: torch.Tensor, source: int = 0, group: Group | None = None) -> torch.Tensor:
    """Writes the result of broadcast into `tensor`, and returns it. For `source` and `group` see broadcast."""
    return _write(tensor, broadcast(tensor, source, group))


def broadcast_object(value: _Value, source: int = 0, group: Group | None = None) -> _Value:
    """Returns rank `source`'s value, as a copy. What the others bring is what they get where the step has failed, so
    let it be something the script can go on with.

    No pickle travels: None, booleans, numbers, strings, bytes, lists, tuples, dictionaries, tensors and NumPy arrays of
    these, nested. No instances of classes, functions, sets or modules: StateCodecError names what can't travel.
    Tensors arrive on the CPU.

    group: the workers that take part; None: all. See new_group.
    Raises StateCodecError on the source, PeerLostError if the source is lost before another worker has the value.
    """
    payload = state_codec.to_bytes(value) if _is_source(source, group) else None
    result = ask(BroadcastBytes(payload, root=source), group)
    return state_codec.from_bytes(result[0])[0] if result else value


def allgather(tensor: torch.Tensor, group: Group | None = None) -> torch.Tensor:
    """Returns every worker's tensor, [members, *tensor.shape], by the ranks that hold when it returns: if a worker is
    lost meanwhile there is one row less, and the others may have new ranks. A worker in its first step brings zeros.

    tensor: the same shape and dtype on every worker.
    group: the workers that take part; None: all. See new_group.
    """
    return ask(Allgather(tensor), group)[0]


def allgather_inplace(tensor: torch.Tensor, group: Group | None = None) -> torch.Tensor:
    """Writes the result of allgather into `tensor`, and returns it. For `group` see allgather.

    tensor: [members, ...]; row `rank` is this worker's, the others are written.
    Raises ValueError if a worker is lost meanwhile, for then there are fewer rows.
    """
    return _write(tensor, allgather(tensor[_own_row(tensor, group)], group))


def allgather_rows(tensor: torch.Tensor, group: Group | None = None) -> torch.Tensor:
    """Concatenates all workers' tensors along the first dimension in the order of ranks, on every worker.

    tensor: [rows, ...]; the number of rows may differ from worker to worker and may be 0, as that of the samples in
    workers' shares of a batch. The other dimensions and the dtype are the same on every worker.
    group: the workers that take part; None: all. See new_group.
    Returns a new tensor without a gradient, on the device of `tensor`.

    In a step, a worker whose batch or micro-batch is a filler of ElasticDataLoader brings no rows and receives those of
    the others; so does a worker in its first step. In a step that fails the result is this worker's own rows, once for
    each worker. If a worker is lost meanwhile outside steps, the result is without its rows.
    Raises ValueError for a tensor without dimensions, MismatchedCollective for rows of different shapes or dtypes,
    PeerLostError, MembersChanged for a group only, JobClosing.
    """
    return ask(AllgatherRows(tensor, is_filler=runtime.engine().has_fillers), group)[0]


def gather(tensor: torch.Tensor, destination: int = 0, group: Group | None = None) -> torch.Tensor | None:
    """Returns every worker's tensor, as allgather does, on rank `destination`; None on the others.

    tensor: the same shape and dtype on every worker.
    group: the workers that take part; None: all. See new_group.
    Raises PeerLostError if that worker is lost.
    """
    return next(iter(ask(Gather(tensor, root=destination), group)), None)


def gather_inplace(tensor: torch.Tensor, destination: int = 0, group: Group | None = None) -> torch.Tensor:
    """Writes the result of gather into `tensor` on rank `destination`, and returns `tensor`. For `group` see gather.

    tensor: [members, ...]; row `rank` is this worker's, and on `destination` the others are written.
    """
    result = gather(tensor[_own_row(tensor, group)], destination, group)
    return tensor if result is None else _write(tensor, result)


def scatter(
    part: torch.Tensor, parts: torch.Tensor | None = None, source: int = 0, group: Group | None = None
) -> torch.Tensor:
    """Returns row `rank` of the source's `parts`.

    part: in the shape and dtype of a row; its values are what a worker gets where the step has failed.
    parts: [members, *part.shape], needed on rank `source` only.
    group: the workers that take part; None: all. See new_group.
    Raises PeerLostError if a worker is lost: its row would have no owner.
    """
    return ask(Scatter(part, parts, root=source), group)[0]


def scatter_inplace(
    part: torch.Tensor, parts: torch.Tensor | None = None, source: int = 0, group: Group | None = None
) -> torch.Tensor:
    """Writes the result of scatter into `part`, and returns it. For `parts`, `source` and `group` see scatter."""
    return _write(part, scatter(part, parts, source, group))


def alltoall(tensor: torch.Tensor, group: Group | None = None) -> torch.Tensor:
    """Sends row r of `tensor` to rank r. Returns the same shape: row r is what rank r had for this worker.

    tensor: [members, ...], the same shape and dtype on every worker.
    group: the workers that take part; None: all. See new_group.
    Raises PeerLostError if a worker is lost.
    """
    return ask(Alltoall(tensor), group)[0]


def alltoall_inplace(tensor: torch.Tensor, group: Group | None = None) -> torch.Tensor:
    """Writes the result of alltoall into `tensor`, and returns it. For `group` see alltoall."""
    return _write(tensor, alltoall(tensor, group))


def alltoall_v(
    tensor: torch.Tensor, splits: Sequence[int], group: Group | None = None
) -> tuple[torch.Tensor, list[int]]:
    """Exchanges unequal parts as alltoall does: the first splits[0] rows go to rank 0, the next splits[1] to rank 1,
    and so on.

    tensor: [sum of splits, ...].
    group: the workers that take part; None: all. See new_group.
    Returns the rows that arrived, by rank, and how many came from each. The shape of a row is the same on all workers.
    Raises PeerLostError if a worker is lost.
    """
    rows, arrived = ask(AlltoallV(tensor, splits), group)
    return rows, [int(n) for n in arrived]


def alltoall_v_inplace(
    tensor: torch.Tensor, splits: Sequence[int], group: Group | None = None
) -> tuple[torch.Tensor, list[int]]:
    """Writes the rows that arrive by alltoall_v into `tensor`, and returns what alltoall_v returns. As many rows must
    arrive as leave, else ValueError. For `splits` and `group` see alltoall_v."""
    rows, arrived = alltoall_v(tensor, splits, group)
    return _write(tensor, rows), arrived


# -- between two workers


def send(tensor: torch.Tensor, destination: int, tag: int = 0, group: Group | None = None) -> None:
    """Sends `tensor` to the worker that calls recv with this rank as source, the same shape, dtype and tag.

    destination: a rank, in the group if one is given.
    tag: tells messages between the same two workers apart.
    group: the workers that take part; None: all. See new_group.

    May wait until the other has called it, and returning does not mean that it has arrived. Outside steps it is never
    run again: raises PeerLostError if the other is lost, MembersChanged if a third worker is, for then it may have
    arrived or not.
    """
    ask(Send(tensor, tag, root=destination), group)


def recv(tensor: torch.Tensor, source: int, tag: int = 0, group: Group | None = None) -> torch.Tensor:
    """Returns the tensor from rank `source`.

    tensor: in the shape and dtype of the result; its values come back where the step has failed.
    tag: that of send.
    group: the workers that take part; None: all. See new_group.
    Raises as send does.
    """
    return ask(Receive(tensor, tag, root=source), group)[0]


def recv_inplace(tensor: torch.Tensor, source: int, tag: int = 0, group: Group | None = None) -> torch.Tensor:
    """Writes the result of recv into `tensor`, and returns it. For `source`, `tag` and `group` see recv."""
    return _write(tensor, recv(tensor, source, tag, group))


def barrier(group: Group | None = None) -> None:
    """Returns when every worker has called it.

    group: the workers that take part; None: all. See new_group.
    Raises PeerLostError, MembersChanged for a group only; JobClosing.
    """
    ask(Barrier(torch.zeros(1, dtype=torch.float32, device="cpu"), ReduceOp.SUM), group)


# -- who am I


def is_alone() -> bool:
    """Tells whether no other worker answers this worker's collectives, so that repeating one gives nothing else: in a
    world of one without an agent, between two steps until this worker's first one, and if the job went on without it.
    Its rank need not be 0."""
    outside = runtime.engine().collectives
    return outside is None or outside.is_alone


def _own_row(tensor: torch.Tensor, group: Group | None) -> int:
    """Returns this worker's place among the rows of `tensor`. Raises ValueError."""
    if group is not None:
        if group.rank is None:
            raise ValueError(f"this worker is not in the group {list(group.ranks)}")
        rank, size = group.rank, group.size
    else:
        rank, size = runtime.engine().place_of_script()
    if not tensor.dim() or tensor.shape[0] != size:
        raise ValueError(
            f"in place there is one row for each of the {size} members, [{size}, ...]: not {tuple(tensor.shape)}"
        )
    return rank


def _is_source(source: int, group: Group | None) -> bool:
    return source == (runtime.engine().place_of_script()[0] if group is None else group.rank)
