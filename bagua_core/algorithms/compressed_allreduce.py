"""Sums gradients in compressed messages, with any compressor: ByteGrad's exchange for other formats.

Commits and heals as plain data parallelism does, and all ranks hold the same bits after each step.
"""

from __future__ import annotations

from bagua_core.algorithms.algorithm import Algorithm, Attachment
from bagua_core.communication.communicator import Lane
from bagua_core.communication.compressed import compressor as compressors
from bagua_core.communication.compressed.compressed_sum import CompressedSum, SumWithFeedback
from bagua_core.communication.compressed.compression import WithFeedback
from bagua_core.communication.compressed.compressor import Compressor
from bagua_core.communication.reduction.exchange import Exchange
from bagua_core.communication.reduction.operation_queue import operation_queue_of
from bagua_core.communication.reduction.reducer import Reducer
from bagua_core.communication.topology.routes import lanes_for


class CompressedAllreduce(Algorithm):
    """Averages gradients in compressed messages. Buckets that are small or not of floats travel as they are.

    compressor: an object, or a registered name: minmax_uint8, minmax_int4, one_bit and others.
    feedback: each worker adds what it could not send to its next contribution, at two copies of the gradients in fp32.
    hierarchical, average: as of ByteGrad.
    Raises UnknownCompressorError.
    """

    name = "compressed_allreduce"

    def __init__(
        self,
        compressor: str | Compressor,
        feedback: bool = True,
        hierarchical: bool = True,
        average: bool = True,
    ) -> None:
        compressors.make(compressor, feedback)
        self.compressor, self.feedback = compressor, feedback
        self.hierarchical, self.average = hierarchical, average

    @property
    def lanes(self) -> frozenset[Lane]:
        return lanes_for(self.hierarchical)

    @property
    def described(self) -> str:
        arguments = f"feedback={self.feedback}, hierarchical={self.hierarchical}, average={self.average}"
        return f"{self.name}({compressors.described(self.compressor)}, {arguments})"

    def attach(self, attachment: Attachment) -> Exchange:
        compression = compressors.make(self.compressor, self.feedback)
        operation_queue = operation_queue_of(attachment.engine)
        operation = (
            SumWithFeedback(operation_queue, compression, self.hierarchical, attachment.engine)
            if isinstance(compression, WithFeedback)
            else CompressedSum(
                operation_queue, compression, self.hierarchical, attachment.engine.replica_size
            )
        )
        return Reducer(
            attachment.parameters,
            attachment.engine,
            attachment.bucket_cap_bytes,
            operation=operation,
            find_unused_parameters=attachment.find_unused_parameters,
            average=self.average,
        )
