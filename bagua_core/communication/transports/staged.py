"""Carries tensors of a GPU through the CPU's memory, where no transport takes them.

Every operation copies what it sends to the host when it is called, and what has arrived back when it is waited for.
That is slow, for the host waits for the GPU before each operation, but any tensor and every operation goes this way.
The copies lie in pinned memory, and the way back runs on the stream of the thread that waits. A transport that was
given up may still write, but only into the copy.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence

import torch

from bagua_core.communication.communicator import Communicator, Pending, ReduceOp
from bagua_core.communication.devices import device_order
from bagua_core.communication.pending import DonePending
from bagua_core.communication.shapes import (
    check_allgather,
    check_alltoall,
    check_alltoall_v,
    check_gather,
    check_reduce_scatter,
    check_scatter,
)


class Staged(Communicator):
    """A communicator of the same ranks as `of_cpu`, whose operations it starts: both together have one order on all
    ranks."""

    def __init__(self, of_cpu: Communicator) -> None:
        self.generation = of_cpu.generation
        self.global_rank = of_cpu.global_rank
        self.world_size = of_cpu.world_size
        self.abort_flag = of_cpu.abort_flag
        self.nodes = of_cpu.nodes
        self._of_cpu = of_cpu

    def allreduce(self, tensor: torch.Tensor, op: ReduceOp = ReduceOp.SUM) -> Pending:
        host = _copied(tensor)
        return _Arriving(self._of_cpu.allreduce(host, op), tensor, host)

    def reduce(self, tensor: torch.Tensor, destination: int, op: ReduceOp = ReduceOp.SUM) -> Pending:
        host = _copied(tensor)
        pending = self._of_cpu.reduce(host, destination, op)
        return _Arriving(pending, tensor, host) if self.global_rank == destination else pending

    def broadcast(self, tensor: torch.Tensor, source: int) -> Pending:
        if self.global_rank == source:
            return self._of_cpu.broadcast(_copied(tensor), source)
        host = _room(tensor)
        return _Arriving(self._of_cpu.broadcast(host, source), tensor, host)

    def allgather(self, output: torch.Tensor, tensor: torch.Tensor) -> Pending:
        check_allgather(self.world_size, output, tensor)  # the copies would lie apart in any case
        return self._into(output, lambda host: self._of_cpu.allgather(host, _copied(tensor)))

    def gather(self, output: torch.Tensor | None, tensor: torch.Tensor, destination: int) -> Pending:
        check_gather(self.world_size, output, tensor, self.global_rank == destination)
        host = _copied(tensor)
        if output is None or self.global_rank != destination:
            return self._of_cpu.gather(None, host, destination)
        return self._into(output, lambda arrived: self._of_cpu.gather(arrived, host, destination))

    def scatter(self, output: torch.Tensor, tensor: torch.Tensor | None, source: int) -> Pending:
        check_scatter(self.world_size, output, tensor, self.global_rank == source)
        host = None if tensor is None or self.global_rank != source else _copied(tensor)
        return self._into(output, lambda arrived: self._of_cpu.scatter(arrived, host, source))

    def alltoall(self, output: torch.Tensor, tensor: torch.Tensor) -> Pending:
        check_alltoall(self.world_size, output, tensor)
        return self._into(output, lambda host: self._of_cpu.alltoall(host, _copied(tensor)))

    def alltoall_v(
        self,
        output: torch.Tensor,
        tensor: torch.Tensor,
        output_splits: Sequence[int],
        input_splits: Sequence[int],
    ) -> Pending:
        check_alltoall_v(self.world_size, output, tensor, output_splits, input_splits)
        return self._into(
            output, lambda host: self._of_cpu.alltoall_v(host, _copied(tensor), output_splits, input_splits)
        )

    def reduce_scatter(
        self, output: torch.Tensor, tensor: torch.Tensor, op: ReduceOp = ReduceOp.SUM
    ) -> Pending:
        check_reduce_scatter(self.world_size, output, tensor)
        return self._into(output, lambda host: self._of_cpu.reduce_scatter(host, _copied(tensor), op))

    def send(self, tensor: torch.Tensor, destination: int, tag: int) -> Pending:
        return self._of_cpu.send(_copied(tensor), destination, tag)

    def receive(self, tensor: torch.Tensor, source: int, tag: int) -> Pending:
        return self._into(tensor, lambda host: self._of_cpu.receive(host, source, tag))

    def swap(
        self, outgoing: Sequence[torch.Tensor], incoming: Mapping[int, Sequence[torch.Tensor]], tag: int
    ) -> list[Pending]:
        hosts = {peer: [_room(tensor) for tensor in theirs] for peer, theirs in incoming.items()}
        begun = self._of_cpu.swap([_copied(tensor) for tensor in outgoing], hosts, tag)
        pairs = [pair for peer in incoming for pair in zip(incoming[peer], hosts[peer], strict=True)]
        # a wait for all of them, in order, has waited for what arrives before it is copied
        return [*begun, *(_Arriving(DonePending(), tensor, host) for tensor, host in pairs)]

    def barrier(self) -> Pending:
        return self._of_cpu.barrier()

    def close(self) -> None:
        super().close()
        self._of_cpu.close()

    def abort(self, reason: str) -> None:
        super().abort(reason)
        self._of_cpu.abort(reason)

    @staticmethod
    def _into(target: torch.Tensor, start: Callable[[torch.Tensor], Pending]) -> Pending:
        host = _room(target)
        return _Arriving(start(host), target, host)


class _Arriving(Pending):
    """An operation whose result is in `host` and belongs in `target`."""

    def __init__(self, pending: Pending, target: torch.Tensor, host: torch.Tensor) -> None:
        self._pending = pending
        self._target = target
        self._host: torch.Tensor | None = host
        self._lock = threading.Lock()

    def wait(self, stalled: Callable[[float], None] | None = None, stall_after_s: float = 0.5) -> None:
        self._pending.wait(stalled, stall_after_s)
        with self._lock:  # once: the script may have changed the tensor since
            if self._host is not None:
                with torch.no_grad():
                    device_order.order_of([self._target]).copy_from_host(self._host, self._target)
                self._host = None

    def is_done(self) -> bool:
        return self._pending.is_done()


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a copy on the host with the same strides: what is not contiguous is refused there. Waits for the
    device."""
    order = device_order.order_of([tensor])
    host = order.copy_to_host(tensor)
    order.now().wait(_any_length)
    return host


def _any_length() -> None:
    """Lets a wait take any time: the device works on what the script has given it, and on nothing of a peer's."""
    return None


def _room(tensor: torch.Tensor) -> torch.Tensor:
    return device_order.order_of([tensor]).room_on_host(tensor)
