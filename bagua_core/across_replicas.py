"""Makes the workers with one shard, one of each replica, a process group that torch.distributed's collectives accept.

Each operation is a collective of the script (collectives.py), and complete when it returns. Rank and size follow the
generation. torch looks up groups in tables that are made for groups of a fixed size, so it finds a view there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _register_process_group
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.distributed import distributed_c10d as torch_groups

from bagua_core.collectives import ask
from bagua_core.communication.communicator import ReduceOp
from bagua_core.elastic.script_collectives.members_changed import MembersChanged
from bagua_core.elastic.script_collectives.requests import (
    Allgather,
    Allreduce,
    Barrier,
    Broadcast,
    ReduceScatter,
)
from bagua_core.elastic.step import runtime
from bagua_core.errors import UserError
from bagua_core.model.sharded_tensors import local

NAME = "bagua_replicas"

Tensors = list[torch.Tensor]


class NotAcrossReplicas(UserError, NotImplementedError):
    """An operation of torch's process groups that the replica group does not have."""


class _Done(dist.Work):
    """The work of an operation that is complete."""

    def __init__(self, tensors: Tensors) -> None:
        super().__init__()
        devices: list[Any] = sorted({str(t.device) for t in tensors if t.device.type != "cpu"})
        self._future: torch.futures.Future[Tensors] = torch.futures.Future(devices=devices)
        self._future.set_result(tensors)

    def wait(self, timeout: object = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def get_future(self) -> Any:
        return self._future


class _Ranks(Mapping[int, int]):
    """Maps ranks in torch's default group to ranks in the replica group. The former is this worker's replica, so only
    it is in both."""

    def _now(self) -> dict[int, int]:
        engine = runtime.engine()
        return {engine.shard_place()[0]: engine.replica_place()[0]}

    def __getitem__(self, rank: int) -> int:
        return self._now()[rank]

    def __iter__(self) -> Iterator[int]:
        return iter(self._now())

    def __len__(self) -> int:
        return 1


class ReplicaGroup(dist.ProcessGroup):
    """The process group that bagua_core.replica_group() returns. Sharded tensors count with their local tensors."""

    _made: ReplicaGroup | None = None

    @classmethod
    def of_this_process(cls) -> ReplicaGroup:
        group = cls._made = cls._made or cls()
        world = torch_groups._world
        if group not in world.pg_map:  # at first, and after torch's destroy_process_group()
            # torch's wrapper of its collectives looks the group up for each error, which another error would replace.
            world.pg_map[group] = (NAME, HashStore())
            world.pg_names[group] = NAME  # type: ignore[assignment]
            world.pg_backend_config[group] = world.pg_to_tag[group] = NAME
            world.pg_group_ranks[group] = _Ranks()  # type: ignore[assignment]
            _register_process_group(NAME, group)  # type: ignore[arg-type]  # for functional collectives
        return group

    def __init__(self) -> None:
        super().__init__(0, 1)  # type: ignore[call-arg]

    def rank(self) -> int:
        return runtime.engine().replica_place()[0]

    def size(self) -> int:
        return runtime.engine().replica_place()[1]

    getRank, getSize = rank, size  # as torch's C++ asks

    def getBackendName(self) -> str:
        return NAME

    @property
    def group_name(self) -> Any:
        return NAME

    def allreduce(self, tensors: Tensors, opts: Any = None) -> _Done:  # type: ignore[override]
        op = _op(opts)
        for tensor in tensors:
            _write(tensor, ask(Allreduce(local(tensor), op, across_replicas=True))[0])
        return _Done(tensors)

    def broadcast(self, tensors: Tensors, opts: Any) -> _Done:  # type: ignore[override]
        for tensor in tensors:
            request = Broadcast(local(tensor), root=opts.rootRank, across_replicas=True)
            _write(tensor, ask(request)[0])
        return _Done(tensors)

    def allgather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = None) -> _Done:  # type: ignore[override]
        for parts, tensor in zip(outputs, inputs, strict=True):
            _check_rows("all_gather fills", len(parts), self.size())
            for part, row in zip(parts, _gathered(tensor, len(parts)), strict=True):
                _write(part, row)
        return _Done([part for parts in outputs for part in parts])

    def all_gather_single(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None) -> _Done:
        size, count = self.size(), tensor.numel()
        _check_rows("all_gather fills", output.numel() / count if count else size, size)
        _write(output, _gathered(tensor, size))
        return _Done([output])

    def reduce_scatter(self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any = None) -> _Done:  # type: ignore[override]
        op = _op(opts)
        for output, parts in zip(outputs, inputs, strict=True):
            _check_rows("reduce_scatter takes", len(parts), self.size())
            _scatter(output, torch.stack([local(part) for part in parts]), op)
        return _Done(outputs)

    def reduce_scatter_single(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None) -> _Done:
        size, count = self.size(), output.numel()
        _check_rows("reduce_scatter takes", tensor.numel() / count if count else size, size)
        _scatter(output, local(tensor).reshape(size, *output.shape), _op(opts))
        return _Done([output])

    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> _Done:
        for output, tensor in zip(outputs, inputs, strict=True):
            self.all_gather_single(output, tensor)
        return _Done(outputs)

    def reduce_scatter_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> _Done:
        for output, tensor in zip(outputs, inputs, strict=True):
            self.reduce_scatter_single(output, tensor, opts)
        return _Done(outputs)

    def barrier(self, opts: Any = None) -> _Done:
        ask(Barrier(torch.zeros(1, dtype=torch.float32, device="cpu"), ReduceOp.SUM, across_replicas=True))
        return _Done([])

    allreduce_coalesced = allreduce


def _refused(name: str) -> Callable[..., NoReturn]:
    def refuse(*args: object, **kwargs: object) -> NoReturn:
        raise NotAcrossReplicas(
            f"bagua.replica_group() has no {name}: it has all_reduce, broadcast, all_gather, reduce_scatter and "
            "barrier. Use the collectives of bagua with group=bagua.new_group(ranks) instead"
        )

    return refuse


for _before, _now in {  # torch 2.13, which calls them by the new names
    "_allgather_base": "all_gather_single",
    "_reduce_scatter_base": "reduce_scatter_single",
    "allgather_into_tensor_coalesced": "all_gather_single_coalesced",
    "reduce_scatter_tensor_coalesced": "reduce_scatter_single_coalesced",
}.items():
    setattr(ReplicaGroup, _before, getattr(ReplicaGroup, _now))

for _name in (
    *("reduce", "gather", "gather_single", "scatter", "alltoall", "alltoall_base", "all_to_all_single"),
    *("send", "recv", "recv_anysource", "monitored_barrier", "allgather_coalesced"),
):
    setattr(ReplicaGroup, _name, _refused(_name))


def _op(opts: Any) -> ReduceOp:
    """Returns the reduction that `opts` asks for. Raises ValueError for one that is not possible."""
    asked = dist.ReduceOp.SUM if opts is None else opts.reduceOp
    for op in ReduceOp:
        if asked == getattr(dist.ReduceOp, op.name):
            return op
    possible = ", ".join(op.name for op in ReduceOp)
    raise ValueError(f"this reduction is not possible across replicas; use one of {possible}")


def _check_rows(what: str, rows: float, size: int) -> None:
    """Checks the number of parts before any peer is asked. Raises ValueError."""
    if rows != size:
        raise ValueError(f"{what} one part for each of the {size} replicas: these are {rows:g}")


def _gathered(tensor: torch.Tensor, size: int) -> torch.Tensor:
    """Returns the tensors of all replicas, [size, ...]. Raises MembersChanged if a replica was lost meanwhile."""
    rows = ask(Allgather(local(tensor), across_replicas=True))[0]
    if len(rows) != size:
        raise MembersChanged(
            f"all_gather across replicas: there are {len(rows)} replicas instead of {size} by now, so the result does "
            "not fit into the tensors for it. Begin anew with as many as there are now"
        )
    return rows


def _scatter(output: torch.Tensor, rows: torch.Tensor, op: ReduceOp) -> None:
    _write(output, ask(ReduceScatter(rows, op, across_replicas=True))[0])


@torch.no_grad()
def _write(tensor: torch.Tensor, value: torch.Tensor) -> None:
    own = local(tensor)
    own.copy_(value.reshape(own.shape))
