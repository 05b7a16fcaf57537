"""Sums a bucket over all ranks, node by node: one bucket per node crosses the network."""

from __future__ import annotations

from bagua_core.communication.communicator import Communicator, Pending
from bagua_core.communication.reduction.bucket_buffer import Bucket
from bagua_core.communication.reduction.bucket_operation import BucketOperation
from bagua_core.communication.reduction.conveyor import Conveyor
from bagua_core.communication.topology import hierarchy


class HierarchicalSum(BucketOperation):
    """See hierarchy.py."""

    carries_pair = True
    takes_new_buckets = True

    def __init__(self, conveyor: Conveyor) -> None:
        self._conveyor = conveyor

    def launch(
        self, communicator: Communicator | None, bucket: Bucket, number: int, weight: float
    ) -> Pending:
        assert communicator is not None
        return self._conveyor.launch(
            communicator, hierarchy.stages(communicator, bucket.reducible), (bucket.flat,)
        )

    def failed(self) -> None:
        self._conveyor.flush()
