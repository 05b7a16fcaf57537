"""Reduces a tensor node by node, for jobs whose links inside a node are faster than those between nodes.

The workers of a node reduce to the node's first, those reduce among each other, and each gives the result to its node:
one tensor a node crosses the slow links instead of one a worker. All ranks get the same bits, and none gets a result
before every rank has contributed.
"""

from __future__ import annotations

from collections.abc import Generator

import torch

from bagua_core.communication.arithmetic import divide
from bagua_core.communication.communicator import Communicator, Pending, ReduceOp
from bagua_core.communication.pending import DonePending
from bagua_core.communication.reducible import carrier_of
from bagua_core.communication.reduction.bucket_buffer import Bucket
from bagua_core.communication.reduction.bucket_operation import BucketOperation
from bagua_core.communication.reduction.operation_queue import OperationQueue
from bagua_core.communication.topology.routes import FIRST_OF_NODE, route_of


class HierarchicalSum(BucketOperation):
    """The operation that sums buckets node by node: one bucket per node crosses the network.

    In a job with replicas of several workers, buckets that some of them hold in common are summed flat: the lanes of
    the shards lie on the nodes in different ways, and the order of a sum by node, and so its bits, would depend on it.
    """

    carries_pair = True
    takes_new_buckets = True

    def __init__(self, operation_queue: OperationQueue, replica_size: int = 1) -> None:
        self._operations = operation_queue
        self._replica_size = replica_size

    def launch(
        self, communicator: Communicator | None, bucket: Bucket, number: int, weight: float
    ) -> Pending:
        assert communicator is not None
        by_node = bucket.plan.sharding.gives_each_its_own(self._replica_size)
        job = stages(communicator, bucket.reducible, hierarchical=by_node)
        return self._operations.launch(communicator, job, (bucket.flat,))

    def failed(self) -> None:
        self._operations.flush()


def stages(
    communicator: Communicator, tensor: torch.Tensor, op: ReduceOp = ReduceOp.SUM, hierarchical: bool = True
) -> Generator[Pending, None, None]:
    """Reduces `tensor` in place over all ranks: yields each wait, on every rank the same number, and goes on when that
    is done.

    communicator: with nodes and the lanes NODE and LEADERS (routes.lanes_for); one whose nodes are not known, or have a
    worker each, reduces flat, as with hierarchical=False. Raises TypeError if op is not defined for the type.
    """
    carrier = carrier_of(tensor, op)
    route = route_of(communicator, hierarchical)
    if route.node is None:
        yield communicator.allreduce(tensor, op)
        return
    adding = ReduceOp.SUM if carrier.op is ReduceOp.AVG else carrier.op
    yield route.node.reduce(carrier.tensor, FIRST_OF_NODE, adding)
    # a wait on every rank, so that the node's collectives keep one order
    yield DonePending() if route.across is None else route.across.allreduce(carrier.tensor, adding)
    if carrier.op is ReduceOp.AVG and route.across is not None:
        divide(carrier.tensor, communicator.world_size)
    yield route.node.broadcast(carrier.tensor, FIRST_OF_NODE)
    if carrier.bring_back is not None:
        carrier.bring_back()
