"""Compresses gradients to eight bits: a quarter of the traffic, for jobs whose network is the bottleneck.

Commits and heals as plain data parallelism does, and all ranks hold the same bits after each step. Each step's gradient
differs from the exact mean by what eight bits lose (docs/kernels.md): per block of 2,048 values at most half a step
of the grid for every rank's contribution, and half a step of the sum's.
"""

from __future__ import annotations

from bagua_core.algorithms.algorithm import Algorithm, Attachment
from bagua_core.communication.communicator import Lane
from bagua_core.communication.compressed.compressed_sum import CompressedSum
from bagua_core.communication.compressed.compression import MinMax
from bagua_core.communication.reduction.bucket_operation import BucketOperation
from bagua_core.communication.reduction.exchange import Exchange
from bagua_core.communication.reduction.operation_queue import operation_queue_of
from bagua_core.communication.reduction.reducer import Reducer
from bagua_core.communication.topology.routes import lanes_for


class ByteGrad(Algorithm):
    """Averages gradients in messages of eight bits a value. Buckets that are small or not of floats travel as they are.

    hierarchical: workers of one node sum up uncompressed first, and only one of each crosses the network.
    average: whether gradients become the mean; if False, the mean times the number of workers.
    """

    name = "bytegrad"

    def __init__(self, hierarchical: bool = True, average: bool = True) -> None:
        self.hierarchical = hierarchical
        self.average = average

    @property
    def lanes(self) -> frozenset[Lane]:
        return lanes_for(self.hierarchical)

    @property
    def described(self) -> str:
        return f"{self.name}(hierarchical={self.hierarchical}, average={self.average})"

    def operation(self, attachment: Attachment) -> BucketOperation:
        """Returns the operation that runs on each full bucket."""
        engine = attachment.engine
        return CompressedSum(operation_queue_of(engine), MinMax(), self.hierarchical, engine.replica_size)

    def attach(self, attachment: Attachment) -> Exchange:
        return Reducer(
            attachment.parameters,
            attachment.engine,
            attachment.bucket_cap_bytes,
            operation=self.operation(attachment),
            find_unused_parameters=attachment.find_unused_parameters,
            average=self.average,
        )
