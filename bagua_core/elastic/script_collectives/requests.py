"""The collectives that a script can request of its peers: one class each.

A request keeps its input, so that it can be run again among other members; what a run writes into is its own, because
an operation that was given up still writes. Ranks are places among the members that take part. Knows nothing of
generations: outside_collectives.py runs these, collectives.py is what scripts call.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch

from bagua_core.communication.communicator import Communicator, Pending, ReduceOp
from bagua_core.communication.reducible import check_reducible
from bagua_core.elastic.waiting.operations import neutral

Wait = Callable[[Pending], None]
Result = list[torch.Tensor]

SCRIPT_TAG = 1 << 20
"""Below it are the tags of the runtime's own messages."""
LARGEST_TAG = (1 << 20) - 1


@dataclass(frozen=True, slots=True)
class Request(ABC):
    """A collective that a script can request.
    tensor: the input; where a rank brings none, in the shape and dtype of what arrives.
    root: the one rank that everything comes from or goes to; None where there is none."""

    name: ClassVar[str]
    direction: ClassVar[str] = ""
    """Of the data, seen from the others: to the root or from it."""
    is_common: ClassVar[bool] = False
    """All members get the same result, one tensor, so that of any member will do."""
    is_cut: ClassVar[bool] = False
    """The input has a part for each member, so it fits these members only."""
    comes_from_root: ClassVar[bool] = False
    """All that the members get is the root's."""
    has_one_shape: ClassVar[bool] = True
    """`tensor` has the same shape on all members."""

    tensor: torch.Tensor
    root: int | None = field(default=None, kw_only=True)
    across_replicas: bool = field(default=False, kw_only=True)
    """The members are the workers with one shard, one of each replica; the workers with another shard do the same."""

    def __post_init__(self) -> None:
        if not isinstance(self.tensor, torch.Tensor):
            kind = type(self.tensor).__name__
            raise TypeError(f"{self.name} takes a tensor, not {kind}; broadcast_object takes other values")

    def asked(self, root: int | None) -> str:
        """Returns a description that is the same on all members that ask for the same."""
        return f"{self.operation(root)}{self.asked_of()}"

    def asked_of_all_shards(self, root: int | None) -> str:
        """Returns a description as `asked` does, which is the same on the workers with every shard: their tensors may
        differ in shape."""
        return self._called(root) if self.across_replicas else self.asked(root)

    def _called(self, root: int | None) -> str:
        peer = "" if root is None else f" {self.direction} rank {root}"
        return f"{self.name}{peer}{' across replicas' if self.across_replicas else ''}"

    def operation(self, root: int | None) -> str:
        """Returns the part of `asked` without the tensor."""
        return self._called(root)

    def asked_of(self) -> str:
        """Returns the part of `asked` with the tensor's shape and dtype; empty where these may differ."""
        return f" of {_said(self.tensor)}"

    @abstractmethod
    def run(self, communicator: Communicator, root: int, wait: Wait) -> Result:
        """Runs the collective and returns its result. root: where the root is by now; 0 if there is none. Raises
        CollectiveFailed."""

    def own(self, rank: int, world_size: int, root: int) -> Result:
        """Returns a result of the right shape from this rank's input alone: what it gets where no peer can answer, and
        exactly right in a world of one. root: as in `run`."""
        return [_copy(self.tensor)]

    def check(self, rank: int, world_size: int) -> None:
        """Checks the request before any peer is asked. Raises ValueError, TypeError."""
        if self.root is not None and not 0 <= self.root < world_size:
            raise ValueError(
                f"rank {self.root} is not among the {world_size} that take part: ranks 0 to {world_size - 1}"
            )

    def without_state(self) -> Request:
        """Returns the same request from a rank that has no state yet, and nothing to say."""
        return replace(self, tensor=torch.zeros_like(self.tensor))

    def in_shape(self, shape: Sequence[int]) -> Request:
        """Returns the same request with zeros in `shape` as its input."""
        return replace(self, tensor=_like(self.tensor, *shape))

    def to_average(self) -> tuple[Request, bool]:
        """Returns the request for the sum, and whether to divide it, for members that do not all count in an
        average."""
        return self, False


def _said(tensor: torch.Tensor) -> str:
    return f"{tuple(tensor.shape)} {tensor.dtype}"


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone(memory_format=torch.contiguous_format)


def _read(tensor: torch.Tensor) -> torch.Tensor:
    """Returns `tensor` as a transport takes it that only reads."""
    return tensor.detach().contiguous()


def _at_root(tensor: torch.Tensor, rank: int, root: int) -> Result:
    return [tensor] if rank == root else []


def _like(tensor: torch.Tensor, *shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=tensor.dtype, device=tensor.device)


def _check_cut(what: str, tensor: torch.Tensor, world_size: int) -> None:
    if not tensor.dim() or tensor.shape[0] != world_size:
        raise ValueError(
            f"{what} takes one part for each of the {world_size} members: a tensor [{world_size}, ...], not "
            f"{tuple(tensor.shape)}"
        )


# -- reductions


@dataclass(frozen=True, slots=True)
class Reduction(Request):
    op: ReduceOp

    def __post_init__(self) -> None:
        Request.__post_init__(self)
        if not isinstance(self.op, ReduceOp):
            raise TypeError(
                f"{self.name}: op={self.op!r} is no bagua_core.ReduceOp, such as bagua_core.ReduceOp.SUM"
            )

    def operation(self, root: int | None) -> str:
        return f"{self._called(root)}, {self.op.value}"

    def check(self, rank: int, world_size: int) -> None:
        check_reducible(self.tensor.dtype, self.op)
        Request.check(self, rank, world_size)

    def without_state(self) -> Request:
        return replace(self, tensor=neutral(self.tensor, self.op))

    def to_average(self) -> tuple[Request, bool]:
        if self.op is not ReduceOp.AVG:
            return self, False
        return replace(self, op=ReduceOp.SUM), True


@dataclass(frozen=True, slots=True)
class Allreduce(Reduction):
    name: ClassVar[str] = "allreduce"
    is_common: ClassVar[bool] = True

    def run(self, communicator: Communicator, root: int, wait: Wait) -> Result:
        result = _copy(self.tensor)
        wait(communicator.allreduce(result, self.op))
        return [result]


@dataclass(frozen=True, slots=True)
class Barrier(Allreduce):
    """An allreduce of nothing in particular: what counts is that it returns."""

    name: ClassVar[str] = "barrier"
    has_one_shape: ClassVar[bool] = False

    def operation(self, root: int | None) -> str:
        return self._called(root)

    def asked_of(self) -> str:
        return ""


@dataclass(frozen=True, slots=True)
class Reduce(Reduction):
    name: ClassVar[str] = "reduce"
    direction: ClassVar[str] = "to"

    def run(self, communicator: Communicator, root: int, wait: Wait) -> Result:
        result = _copy(self.tensor)
        wait(communicator.reduce(result, root, self.op))
        return _at_root(result, communicator.global_rank, root)

    def own(self, rank: int, world_size: int, root: int) -> Result:
        return _at_root(_copy(self.tensor), rank, root)


@dataclass(frozen=True, slots=True)
class ReduceScatter(Reduction):
    name: ClassVar[str] = "reduce_scatter"
    is_cut: ClassVar[bool] = True

    def check(self, rank: int, world_size: int) -> None:
        Reduction.check(self, rank, world_size)
        _check_cut(self.name, self.tensor, world_size)

    def run(self, communicator: Communicator, root: int, wait: Wait) -> Result:
        result = _like(self.tensor, *self.tensor.shape[1:])
        wait(communicator.reduce_scatter(result, _read(self.tensor), self.op))
        return [result]

    def own(self, rank: int, world_size: int, root: int) -> Result:
        return [_copy(self.tensor[rank])]


# -- moving data


@dataclass(frozen=True, slots=True)
class Broadcast(Request):
    """Gives all ranks the root's tensor. Every rank brings a tensor of the root's shape and dtype."""

    name: ClassVar[str] = "broadcast"
    direction: ClassVar[str] = "from"
    comes_from_root: ClassVar[bool] = True
    is_common: ClassVar[bool] = True

    def run(self, communicator: Communicator, root: int, wait: Wait) -> Result:
        result = _copy(self.tensor)
        wait(communicator.broadcast(result, root))
        return [result]


@dataclass(frozen=True, slots=True)
class BroadcastBytes(Request):
    """Gives all ranks the root's bytes. payload: uint8, any length, of the root; None elsewhere, where there is no
    result without peers."""

    name: ClassVar[str] = "broadcast_object"
    direction: ClassVar[str] = "from"
    comes_from_root: ClassVar[bool] = True
    is_common: ClassVar[bool] = True
    has_one_shape: ClassVar[bool] = False

    tensor: torch.Tensor = field(
        default_factory=lambda: torch.empty(0, dtype=torch.uint8, device="cpu"), init=False
    )
    payload: torch.Tensor | None

    def asked_of(self) -> str:
        return ""

    def run(self, communicator: Communicator, root: int, wait: Wait) -> Result:
        is_root = communicator.global_rank == root
        payload = (
            self.payload
            if is_root and self.payload is not None
            else torch.empty(0, dtype=torch.uint8, device="cpu")
        )
        size = torch.tensor([payload.numel()], dtype=torch.int64, device="cpu")
        wait(communicator.broadcast(size, root))
        if not is_root:
            payload = torch.empty(int(size), dtype=torch.uint8, device="cpu")
        wait(communicator.broadcast(payload, root))
        return [payload]

    def own(self, rank: int, world_size: int, root: int) -> Result:
        return [] if self.payload is None else [self.payload]

    def without_state(self) -> Request:
        return self


@dataclass(frozen=True, slots=True)
class Allgather(Request):
    name: ClassVar[str] = "allgather"
    is_common: ClassVar[bool] = True

    def run(self, communicator: Communicator, root: int, wait: Wait) -> Result:
        result = _like(self.tensor, communicator.world_size, *self.tensor.shape)
        wait(communicator.allgather(result, _read(self.tensor)))
        return [result]

    def own(self, rank: int, world_size: int, root: int) -> Result:
        return [_copy(self.tensor.expand(world_size, *self.tensor.shape))]


@dataclass(frozen=True, slots=True)
class AllgatherRows(Allgather):
    """An allgather along the first dimension, whose size may differ and be 0.

    is_filler: the rows are computed from fillers. The rank brings none of them, and has them where no peer can answer.
    """

    name: ClassVar[str] = "allgather_rows"
    has_one_shape: ClassVar[bool] = False

    is_filler: bool = field(default=False, kw_only=True)

    def asked_of(self) -> str:
        return f" of rows of {tuple(self.tensor.shape[1:])} {self.tensor.dtype}"

    def check(self, rank: int, world_size: int) -> None:
        Request.check(self, rank, world_size)
        if not self.tensor.dim():
            raise ValueError(f"{self.name} takes rows: a tensor [rows, ...], not {tuple(self.tensor.shape)}")

    def run(self, communicator: Communicator, root: int, wait: Wait) -> Result:
        rows = self.tensor[:0] if self.is_filler else self.tensor
        row_counts = torch.zeros((communicator.world_size, 1), dtype=torch.int64, device="cpu")
        own_count = torch.tensor([rows.shape[0]], dtype=torch.int64, device="cpu")
        wait(communicator.allgather(row_counts, own_count))
        counts = [int(n) for n in row_counts]
        padded = _like(rows, max(counts), *rows.shape[1:])
        padded[: rows.shape[0]] = rows.detach()
        gathered = _like(rows, communicator.world_size, *padded.shape)
        if gathered.numel():  # the same on all ranks
            wait(communicator.allgather(gathered, padded))
        return [torch.cat([part[:n] for part, n in zip(gathered, counts, strict=True)])]

    def own(self, rank: int, world_size: int, root: int) -> Result:
        return [_copy(self.tensor.expand(world_size, *self.tensor.shape).flatten(0, 1))]

    def without_state(self) -> Request:
        return replace(self, tensor=self.tensor[:0])


@dataclass(frozen=True, slots=True)
class Gather(Request):
    name: ClassVar[str] = "gather"
    direction: ClassVar[str] = "to"

    def run(self, communicator: Communicator, root: int, wait: Wait) -> Result:
        result: torch.Tensor | None = None
        if communicator.global_rank == root:
            result = _like(self.tensor, communicator.world_size, *self.tensor.shape)
        wait(communicator.gather(result, _read(self.tensor), root))
        return [] if result is None else [result]

    def own(self, rank: int, world_size: int, root: int) -> Result:
        whole = self.tensor.expand(world_size, *self.tensor.shape)
        return _at_root(_copy(whole), rank, root)


@dataclass(frozen=True, slots=True)
class Scatter(Request):
    """Gives each rank its row of the root's parts. parts: [members, *tensor.shape] on the root."""

    name: ClassVar[str] = "scatter"
    direction: ClassVar[str] = "from"
    comes_from_root: ClassVar[bool] = True
    is_cut: ClassVar[bool] = True

    parts: torch.Tensor | None

    def asked_of(self) -> str:
        return f" into {_said(self.tensor)}"

    def check(self, rank: int, world_size: int) -> None:
        Request.check(self, rank, world_size)
        if rank != self.root:
            return
        if self.parts is None:
            raise ValueError(f"scatter: rank {rank} is the source, so it must bring the parts")
        _check_cut(self.name, self.parts, world_size)
        if self.parts.shape[1:] != self.tensor.shape or self.parts.dtype != self.tensor.dtype:
            raise ValueError(f"scatter of {_said(self.parts)} cannot fill a part of {_said(self.tensor)}")

    def run(self, communicator: Communicator, root: int, wait: Wait) -> Result:
        result = _copy(self.tensor)
        is_root = communicator.global_rank == root
        parts = _read(self.parts) if is_root and self.parts is not None else None
        wait(communicator.scatter(result, parts, root))
        return [result]

    def own(self, rank: int, world_size: int, root: int) -> Result:
        return [_copy(self.tensor if rank != root or self.parts is None else self.parts[rank])]


@dataclass(frozen=True, slots=True)
class Alltoall(Request):
    name: ClassVar[str] = "alltoall"
    is_cut: ClassVar[bool] = True

    def check(self, rank: int, world_size: int) -> None:
        Request.check(self, rank, world_size)
        _check_cut(self.name, self.tensor, world_size)

    def run(self, communicator: Communicator, root: int, wait: Wait) -> Result:
        result = torch.empty_like(self.tensor, memory_format=torch.contiguous_format)
        wait(communicator.alltoall(result, _read(self.tensor)))
        return [result]


@dataclass(frozen=True, slots=True)
class AlltoallV(Request):
    """Sends each member its rows. splits: rows for each member. The result is the rows that arrived, and how many from
    each (int64)."""

    name: ClassVar[str] = "alltoall_v"
    is_cut: ClassVar[bool] = True
    has_one_shape: ClassVar[bool] = False

    splits: Sequence[int]

    def asked_of(self) -> str:
        return f" of rows of {tuple(self.tensor.shape[1:])} {self.tensor.dtype}"

    def check(self, rank: int, world_size: int) -> None:
        Request.check(self, rank, world_size)
        tensor, splits = self.tensor, list(self.splits)
        if not tensor.dim() or len(splits) != world_size or sum(splits) != tensor.shape[0] or min(splits) < 0:
            raise ValueError(
                f"alltoall_v among {world_size} members cannot cut {tuple(tensor.shape)} into {splits} rows: one "
                "number for each member, whose sum is the first dimension"
            )

    def run(self, communicator: Communicator, root: int, wait: Wait) -> Result:
        outgoing = torch.tensor(list(self.splits), dtype=torch.int64, device="cpu")
        incoming = torch.zeros_like(outgoing)
        wait(communicator.alltoall(incoming, outgoing))
        rows = [int(n) for n in incoming]
        result = _like(self.tensor, sum(rows), *self.tensor.shape[1:])
        wait(communicator.alltoall_v(result, _read(self.tensor), rows, list(self.splits)))
        return [result, incoming]

    def own(self, rank: int, world_size: int, root: int) -> Result:
        return [_copy(self.tensor), torch.tensor(list(self.splits), dtype=torch.int64, device="cpu")]


# -- between two


@dataclass(frozen=True, slots=True)
class Message(Request):
    has_one_shape: ClassVar[bool] = False

    tag: int

    def check(self, rank: int, world_size: int) -> None:
        Request.check(self, rank, world_size)
        if self.root == rank:
            raise ValueError(f"{self.name} {self.direction} rank {rank}: that is this worker itself")
        if not 0 <= self.tag <= LARGEST_TAG:
            raise ValueError(f"a tag is a number from 0 to {LARGEST_TAG}, not {self.tag}")


@dataclass(frozen=True, slots=True)
class Send(Message):
    name: ClassVar[str] = "send"
    direction: ClassVar[str] = "to"

    def run(self, communicator: Communicator, root: int, wait: Wait) -> Result:
        wait(communicator.send(_read(self.tensor), root, SCRIPT_TAG + self.tag))
        return []

    def own(self, rank: int, world_size: int, root: int) -> Result:
        return []


@dataclass(frozen=True, slots=True)
class Receive(Message):
    name: ClassVar[str] = "receive"
    direction: ClassVar[str] = "from"

    def run(self, communicator: Communicator, root: int, wait: Wait) -> Result:
        result = torch.empty_like(self.tensor, memory_format=torch.contiguous_format)
        wait(communicator.receive(result, root, SCRIPT_TAG + self.tag))
        return [result]
