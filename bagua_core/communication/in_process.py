"""Collectives among threads of one process: the communicator for tests.

Owns matching and arithmetic. The n-th collective of every rank forms one operation, done by whoever
arrives last. As with a real transport, an operation that was given up still writes when it completes.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from bagua_core.communication.communicator import (
    AbortFlag,
    CollectiveAborted,
    CollectiveFailed,
    Communicator,
    Pending,
    ReduceOp,
)
from bagua_core.communication.pending import FailedPending, WakeablePending


class _InProcessPending(WakeablePending):
    def __init__(self, abort_flag: AbortFlag) -> None:
        super().__init__(abort_flag)
        self._lock = threading.Lock()
        self._done = False
        self._error: CollectiveFailed | None = None
        self._wakes: list[Callable[[object], None]] = []

    def finish(self, error: CollectiveFailed | None = None) -> None:
        with self._lock:
            if self._done:
                return
            self._done, self._error = True, error
            wakes, self._wakes = self._wakes, []
        for wake in wakes:
            wake(None)

    def is_done(self) -> bool:
        return self._done

    def _call_when_done(self, wake: Callable[[object], None]) -> None:
        with self._lock:
            if not self._done:
                self._wakes.append(wake)
                return
        wake(None)

    def _collect(self) -> None:
        if self._error is not None:
            raise self._error


@dataclass(slots=True)
class _Part:
    """What one rank brings to an operation."""

    signature: tuple[object, ...]  # must agree on all ranks
    tensor: torch.Tensor
    output: torch.Tensor | None
    pending: _InProcessPending


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
        return self._collective(("allreduce", op, tensor.shape, tensor.dtype), tensor)

    def broadcast(self, tensor: torch.Tensor, source: int) -> Pending:
        self._check_rank(source)
        return self._collective(("broadcast", source, tensor.shape, tensor.dtype), tensor)

    def allgather(self, output: torch.Tensor, tensor: torch.Tensor) -> Pending:
        if output.shape != (self.world_size, *tensor.shape) or output.dtype != tensor.dtype:
            raise ValueError(f"allgather of {tuple(tensor.shape)} cannot fill {tuple(output.shape)}")
        return self._collective(("allgather", tensor.shape, tensor.dtype), tensor, output)

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
        self, signature: tuple[object, ...], tensor: torch.Tensor, output: torch.Tensor | None = None
    ) -> Pending:
        number, self._next_operation = self._next_operation, self._next_operation + 1
        exchange = self._exchange
        part = _Part(signature, tensor, output, _InProcessPending(self.abort_flag))
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
    with torch.no_grad():
        if signature[0] == "allreduce":
            _reduce([p.tensor for p in parts], signature[1])
        elif signature[0] == "broadcast":
            source = signature[1]
            assert isinstance(source, int)
            for part in parts:
                part.tensor.copy_(parts[source].tensor)
        else:
            gathered = torch.stack([p.tensor for p in parts])
            for part in parts:
                assert part.output is not None
                part.output.copy_(gathered)
    return None


def _reduce(tensors: list[torch.Tensor], op: object) -> None:
    total = tensors[0].clone()
    for tensor in tensors[1:]:
        if op in (ReduceOp.SUM, ReduceOp.AVG):
            total += tensor
        elif op is ReduceOp.MIN:
            total = torch.minimum(total, tensor)
        elif op is ReduceOp.MAX:
            total = torch.maximum(total, tensor)
        else:
            total *= tensor
    if op is ReduceOp.AVG:
        whole = not (total.is_floating_point() or total.is_complex())
        total.div_(len(tensors), rounding_mode="trunc" if whole else None)
    for tensor in tensors:
        tensor.copy_(total)
