"""Reduces a tensor node by node, for jobs whose links inside a node are faster than those between nodes.

The workers of a node reduce to the node's first, those reduce among each other, and each gives the result to its node:
one tensor a node crosses the slow links instead of one a worker. It has two forms: `stages` for a caller that runs
several at a time (conveyor.py), `allreduce` for a caller that waits. All ranks get the same bits, and none gets a
result before every rank has contributed.
"""

from __future__ import annotations

from collections.abc import Callable, Generator

import torch

from bagua_core.communication.arithmetic import divide
from bagua_core.communication.communicator import Communicator, Pending, ReduceOp
from bagua_core.communication.pending import DonePending
from bagua_core.communication.reducible import carrier_of
from bagua_core.communication.topology.routes import FIRST_OF_NODE, route_of


def stages(
    communicator: Communicator, tensor: torch.Tensor, op: ReduceOp = ReduceOp.SUM
) -> Generator[Pending, None, None]:
    """Allreduce `tensor` in place: yields each wait, on every rank the same number, and goes on when that is done.

    communicator: with nodes and the lanes NODE and LEADERS (routes.lanes_for); one whose nodes are not known, or have a
    worker each, reduces flat. Raises TypeError where op means nothing for the type.
    """
    carrier = carrier_of(tensor, op)
    route = route_of(communicator, hierarchical=True)
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


def allreduce(
    communicator: Communicator,
    tensor: torch.Tensor,
    op: ReduceOp = ReduceOp.SUM,
    wait: Callable[[Pending], None] = lambda pending: pending.wait(),
) -> None:
    """See `stages`; returns when it is done. wait: the engine's, to be told of stalls. Raises CollectiveFailed."""
    for pending in stages(communicator, tensor, op):
        wait(pending)
