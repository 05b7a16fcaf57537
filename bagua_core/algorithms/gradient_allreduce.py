"""Implements plain data parallelism: every step's gradient is the mean over all samples of the global batch."""

from __future__ import annotations

from bagua_core.algorithms.algorithm import Algorithm, Attachment
from bagua_core.communication.communicator import Lane
from bagua_core.communication.reduction.bucket_operation import BucketOperation, Sum
from bagua_core.communication.reduction.exchange import Exchange
from bagua_core.communication.reduction.operation_queue import operation_queue_of
from bagua_core.communication.reduction.reducer import Reducer
from bagua_core.communication.shards.shard_reducer import ShardReducer
from bagua_core.communication.topology.hierarchical_sum import HierarchicalSum
from bagua_core.communication.topology.routes import lanes_for


class GradientAllreduce(Algorithm):
    """Averages gradients over all samples of the global batch.

    hierarchical: one bucket a node crosses the network instead of one a worker.
    average: whether gradients become the mean; if False, the mean times the number of workers.
    """

    name = "gradient_allreduce"

    def __init__(self, hierarchical: bool = False, average: bool = True) -> None:
        self.hierarchical = hierarchical
        self.average = average

    @property
    def lanes(self) -> frozenset[Lane]:
        return lanes_for(self.hierarchical)

    @property
    def described(self) -> str:
        if not self.hierarchical and self.average:
            return self.name
        return f"{self.name}(hierarchical={self.hierarchical}, average={self.average})"

    @property
    def has_fixed_order(self) -> bool:
        """Whether the algorithm can serve deterministic jobs; see Algorithm."""
        return self.average  # else the scale would be the number of workers

    def operation(self, attachment: Attachment) -> BucketOperation:
        """Returns the operation that runs on each full bucket."""
        engine = attachment.engine
        return (
            HierarchicalSum(operation_queue_of(engine), engine.replica_size) if self.hierarchical else Sum()
        )

    def attach(self, attachment: Attachment) -> Exchange:
        if attachment.shard_buffers is not None:
            return ShardReducer(
                attachment.parameters,
                attachment.engine,
                attachment.bucket_cap_bytes,
                attachment.find_unused_parameters,
                operation_queue_of(attachment.engine),
                attachment.shard_buffers,
            )
        return Reducer(
            attachment.parameters,
            attachment.engine,
            attachment.bucket_cap_bytes,
            operation=self.operation(attachment),
            find_unused_parameters=attachment.find_unused_parameters,
            average=self.average,
        )
