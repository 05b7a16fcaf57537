"""Collectives among threads of one process: the communicator for tests.

Owns matching and arithmetic. The n-th collective of every rank forms one operation, which the
last rank to arrive carries out. As with a real transport, an abandoned operation still writes when it completes.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from bagua_core.communication.arithmetic import reduce_parts
from bagua_core.communication.communicator import (
    AbortFlag,
    CollectiveAborted,
    CollectiveFailed,
    Communicator,
    Pending,
    ReduceOp,
)
from bagua_core.communication.pending import Completion, FailedPending, WakeablePending
from bagua_core.communication.reducible import check_reducible
from bagua_core.communication.shapes import (
    check_allgather,
    check_alltoall,
    check_alltoall_v,
    check_gather,
    check_reduce_scatter,
    check_scatter,
)


class _InProcessPending(WakeablePending):
    def __init__(self, abort_flag: AbortFlag) -> None:
        super().__init__(abort_flag)
        self._completion = Completion()

    def finish(self, error: CollectiveFailed | None = None) -> None:
        self._completion.end(error)

    def is_done(self) -> bool:
        return self._completion.is_over

    def _call_when_done(self, wake: Callable[[object], None]) -> None:
        self._completion.call_when_over(wake)

    def _collect(self) -> None:
        if self._completion.error is not None:
            raise self._completion.error


@dataclass(slots=True)
class _Part:
    """What one rank brings to an operation."""

    signature: tuple[object, ...]  # must agree on all ranks
    tensor: torch.Tensor
    output: torch.Tensor | None
    pending: _InProcessPending
    splits: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())  # of output and tensor


@dataclass(slots=True)
class _Exchange:
    """The state that all ranks of one world share."""

    world_size: int
    lock: threading.Lock = field(default_factory=threading.Lock)
    operations: dict[int, dict[int, _Part]] = field(default_factory=dict)
    sends: dict[tuple[int, int, int], deque[_Part]] = field(default_factory=dict)
    receives: dict[tuple[int, int, int], deque[_Part]] = field(default_factory=dict)
    lost: CollectiveFailed | None = None

    def fail_all(self, error: CollectiveFailed) -> None:
        with self.lock:
            self.lost = error
            parts = [p for operation in self.operations.values() for p in operation.values()]
            for queues in (self.sends, self.receives):
                parts += [p for queue in queues.values() for p in queue]
            self.operations.clear()
            self.sends.clear()
            self.receives.clear()
        for part in parts:
            part.pending.finish(error)


class InProcessCommunicator(Communicator):
    """Use build_in_process. A rank that never calls is a silent peer; `lose` is a peer's death."""

    def __init__(self, exchange: _Exchange, generation: int, global_rank: int, abort_flag: AbortFlag) -> None:
        self.generation = generation
        self.global_rank = global_rank
        self.world_size = exchange.world_size
        self.abort_flag = abort_flag
        self._exchange = exchange
        self._next_operation = 0

    def allreduce(self, tensor: torch.Tensor, op: ReduceOp = ReduceOp.SUM) -> Pending:
        check_reducible(tensor.dtype, op)
        return self._collective(("allreduce", op, tensor.shape, tensor.dtype), tensor)

    def reduce(self, tensor: torch.Tensor, destination: int, op: ReduceOp = ReduceOp.SUM) -> Pending:
        self._check_rank(destination)
        check_reducible(tensor.dtype, op)
        return self._collective(("reduce", op, destination, tensor.shape, tensor.dtype), tensor)

    def gather(self, output: torch.Tensor | None, tensor: torch.Tensor, destination: int) -> Pending:
        self._check_rank(destination)
        check_gather(self.world_size, output, tensor, self.global_rank == destination)
        return self._collective(("gather", destination, tensor.shape, tensor.dtype), tensor, output)

    def scatter(self, output: torch.Tensor, tensor: torch.Tensor | None, source: int) -> Pending:
        self._check_rank(source)
        check_scatter(self.world_size, output, tensor, self.global_rank == source)
        brought = tensor if tensor is not None and self.global_rank == source else output
        return self._collective(("scatter", source, output.shape, output.dtype), brought, output)

    def alltoall_v(
        self,
        output: torch.Tensor,
        tensor: torch.Tensor,
        output_splits: Sequence[int],
        input_splits: Sequence[int],
    ) -> Pending:
        check_alltoall_v(self.world_size, output, tensor, output_splits, input_splits)
        signature = ("alltoall_v", tensor.shape[1:], tensor.dtype)
        return self._collective(signature, tensor, output, (tuple(output_splits), tuple(input_splits)))

    def broadcast(self, tensor: torch.Tensor, source: int) -> Pending:
        self._check_rank(source)
        return self._collective(("broadcast", source, tensor.shape, tensor.dtype), tensor)

    def allgather(self, output: torch.Tensor, tensor: torch.Tensor) -> Pending:
        check_allgather(self.world_size, output, tensor)
        return self._collective(("allgather", tensor.shape, tensor.dtype), tensor, output)

    def alltoall(self, output: torch.Tensor, tensor: torch.Tensor) -> Pending:
        check_alltoall(self.world_size, output, tensor)
        return self._collective(("alltoall", tensor.shape, tensor.dtype), tensor, output)

    def reduce_scatter(
        self, output: torch.Tensor, tensor: torch.Tensor, op: ReduceOp = ReduceOp.SUM
    ) -> Pending:
        check_reduce_scatter(self.world_size, output, tensor)
        check_reducible(tensor.dtype, op)
        return self._collective(("reduce_scatter", op, tensor.shape, tensor.dtype), tensor, output)

    def send(self, tensor: torch.Tensor, destination: int, tag: int) -> Pending:
        self._check_rank(destination)
        channel = (self.global_rank, destination, tag)
        return self._pairwise(channel, tensor, self._exchange.sends, self._exchange.receives, is_send=True)

    def receive(self, tensor: torch.Tensor, source: int, tag: int) -> Pending:
        self._check_rank(source)
        channel = (source, self.global_rank, tag)
        return self._pairwise(channel, tensor, self._exchange.receives, self._exchange.sends, is_send=False)

    def lose(self, host: str) -> None:
        """This rank dies: every operation under way, and every later one, fails and names `host`."""
        self._exchange.fail_all(CollectiveFailed(f"connection closed by peer [{host}]", (host,)))

    def _check_rank(self, global_rank: int) -> None:
        if not 0 <= global_rank < self.world_size:
            raise ValueError(f"global_rank {global_rank} is not in a world of {self.world_size}")

    def _refusal(self) -> FailedPending | None:
        if self.abort_flag.is_set():
            return FailedPending(CollectiveAborted(self.abort_flag.reason or "aborted"))
        if self._exchange.lost is not None:
            return FailedPending(self._exchange.lost)
        return None

    def _collective(
        self,
        signature: tuple[object, ...],
        tensor: torch.Tensor,
        output: torch.Tensor | None = None,
        splits: tuple[tuple[int, ...], tuple[int, ...]] = ((), ()),
    ) -> Pending:
        number, self._next_operation = self._next_operation, self._next_operation + 1
        exchange = self._exchange
        part = _Part(signature, tensor, output, _InProcessPending(self.abort_flag), splits)
        with exchange.lock:
            refusal = self._refusal()
            if refusal is not None:
                return refusal
            parts = exchange.operations.setdefault(number, {})
            parts[self.global_rank] = part
            if len(parts) < exchange.world_size:
                return part.pending
            del exchange.operations[number]
        ordered = [parts[r] for r in range(exchange.world_size)]
        error = _perform(ordered)
        for each in ordered:
            each.pending.finish(error)
        return part.pending

    def _pairwise(
        self,
        channel: tuple[int, int, int],
        tensor: torch.Tensor,
        own: dict[tuple[int, int, int], deque[_Part]],
        others: dict[tuple[int, int, int], deque[_Part]],
        is_send: bool,
    ) -> Pending:
        part = _Part((), tensor, None, _InProcessPending(self.abort_flag))
        with self._exchange.lock:
            refusal = self._refusal()
            if refusal is not None:
                return refusal
            waiting = others.get(channel)
            if not waiting:
                own.setdefault(channel, deque()).append(part)
                return part.pending
            other = waiting.popleft()
        target, origin = (other, part) if is_send else (part, other)
        with torch.no_grad():
            target.tensor.copy_(origin.tensor)
        for each in (other, part):
            each.pending.finish()
        return part.pending


def build_in_process(
    world_size: int, generation: int = 1, abort_flags: list[AbortFlag] | None = None
) -> list[InProcessCommunicator]:
    """One communicator a rank, in rank order, each with its own abort flag."""
    flags = abort_flags or [AbortFlag() for _ in range(world_size)]
    exchange = _Exchange(world_size)
    return [InProcessCommunicator(exchange, generation, r, flags[r]) for r in range(world_size)]


def _perform(parts: list[_Part]) -> CollectiveFailed | None:
    """Do the operation that all ranks have reached. parts: in rank order."""
    signature = parts[0].signature
    for global_rank, part in enumerate(parts):
        if part.signature != signature:
            return CollectiveFailed(
                f"rank 0 called {signature} while rank {global_rank} called {part.signature}"
            )
    if signature[0] == "alltoall_v":
        for r, part in enumerate(parts):
            offered = tuple(p.splits[1][r] for p in parts)
            if part.splits[0] != offered:
                return CollectiveFailed(f"rank {r} expects {part.splits[0]} rows, the others have {offered}")
    with torch.no_grad():
        _act(parts, signature)
    return None


def _act(parts: list[_Part], signature: tuple[Any, ...]) -> None:
    tensors = [p.tensor for p in parts]
    outputs = [p.output for p in parts if p.output is not None]
    match signature[0]:
        case "allreduce":
            total = torch.empty_like(tensors[0])
            reduce_parts(tensors, signature[1], total)
            for tensor in tensors:
                tensor.copy_(total)
        case "reduce":
            total = torch.empty_like(tensors[0])
            reduce_parts(tensors, signature[1], total)
            for r, tensor in enumerate(tensors):
                if r == signature[2]:
                    tensor.copy_(total)
                else:
                    tensor.zero_()
        case "gather":
            target = parts[signature[1]].output
            assert target is not None
            target.copy_(torch.stack(tensors))
        case "scatter":
            for part, tensor in zip(parts, tensors[signature[1]], strict=True):
                assert part.output is not None
                part.output.copy_(tensor)
        case "alltoall_v":
            pieces = [torch.split(p.tensor, list(p.splits[1])) for p in parts]
            for r, part in enumerate(parts):
                assert part.output is not None
                part.output.copy_(torch.cat([rows[r] for rows in pieces]))
        case "broadcast":
            for tensor in tensors:
                tensor.copy_(tensors[signature[1]])
        case "allgather":
            for output in outputs:
                output.copy_(torch.stack(tensors))
        case "alltoall":
            for r, output in enumerate(outputs):
                output.copy_(torch.stack([t[r] for t in tensors]))
        case "reduce_scatter":
            for r, output in enumerate(outputs):
                reduce_parts([t[r] for t in tensors], signature[1], output)
