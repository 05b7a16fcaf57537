"""One communicator of two transports: Gloo carries CPU tensors, NCCL carries GPU tensors.

The runtime's own messages (names, votes, copies of the state) are of the CPU, gradients are where the model is. Both
transports belong to one generation and end together. Where NCCL can't be used, staged.py replaces it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from bagua_core.communication.communicator import Communicator, Pending, ReduceOp


def is_of_gpu(tensor: torch.Tensor) -> bool:
    return tensor.device.type != "cpu"


class ByDevice(Communicator):
    """A communicator of two transports. of_cpu and of_gpu: of the same ranks, with the same abort flag."""

    def __init__(self, of_cpu: Communicator, of_gpu: Communicator) -> None:
        if of_cpu.abort_flag is not of_gpu.abort_flag or of_cpu.world_size != of_gpu.world_size:
            raise ValueError("both transports of a communicator have the same ranks and one abort flag")
        self.generation = of_cpu.generation
        self.global_rank = of_cpu.global_rank
        self.world_size = of_cpu.world_size
        self.abort_flag = of_cpu.abort_flag
        self.nodes = of_cpu.nodes
        self._of_cpu = of_cpu
        self._of_gpu = of_gpu

    def _for(self, tensor: torch.Tensor) -> Communicator:
        return self._of_gpu if is_of_gpu(tensor) else self._of_cpu

    def allreduce(self, tensor: torch.Tensor, op: ReduceOp = ReduceOp.SUM) -> Pending:
        return self._for(tensor).allreduce(tensor, op)

    def reduce(self, tensor: torch.Tensor, destination: int, op: ReduceOp = ReduceOp.SUM) -> Pending:
        return self._for(tensor).reduce(tensor, destination, op)

    def broadcast(self, tensor: torch.Tensor, source: int) -> Pending:
        return self._for(tensor).broadcast(tensor, source)

    def allgather(self, output: torch.Tensor, tensor: torch.Tensor) -> Pending:
        return self._for(tensor).allgather(output, tensor)

    def gather(self, output: torch.Tensor | None, tensor: torch.Tensor, destination: int) -> Pending:
        return self._for(tensor).gather(output, tensor, destination)

    def scatter(self, output: torch.Tensor, tensor: torch.Tensor | None, source: int) -> Pending:
        return self._for(output).scatter(output, tensor, source)

    def alltoall(self, output: torch.Tensor, tensor: torch.Tensor) -> Pending:
        return self._for(tensor).alltoall(output, tensor)

    def alltoall_v(
        self,
        output: torch.Tensor,
        tensor: torch.Tensor,
        output_splits: Sequence[int],
        input_splits: Sequence[int],
    ) -> Pending:
        return self._for(tensor).alltoall_v(output, tensor, output_splits, input_splits)

    def reduce_scatter(
        self, output: torch.Tensor, tensor: torch.Tensor, op: ReduceOp = ReduceOp.SUM
    ) -> Pending:
        return self._for(tensor).reduce_scatter(output, tensor, op)

    def send(self, tensor: torch.Tensor, destination: int, tag: int) -> Pending:
        return self._for(tensor).send(tensor, destination, tag)

    def receive(self, tensor: torch.Tensor, source: int, tag: int) -> Pending:
        return self._for(tensor).receive(tensor, source, tag)

    def swap(
        self, outgoing: Sequence[torch.Tensor], incoming: Mapping[int, Sequence[torch.Tensor]], tag: int
    ) -> list[Pending]:
        return self._for(outgoing[0]).swap(outgoing, incoming, tag) if outgoing else []

    def barrier(self) -> Pending:
        return self._of_cpu.barrier()

    def drain(self) -> list[Pending]:
        return [*super().drain(), *self._of_gpu.drain()]

    def close(self) -> None:
        super().close()
        for transport in (self._of_cpu, self._of_gpu):
            transport.close()

    def abort(self, reason: str) -> None:
        super().abort(reason)
        for transport in (self._of_cpu, self._of_gpu):
            transport.abort(reason)
