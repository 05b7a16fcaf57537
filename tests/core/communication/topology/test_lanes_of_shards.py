"""Sums of a replica's shards, whose lanes lie on the nodes in different ways."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from bagua_core.algorithms import Attachment
from bagua_core.algorithms.bytegrad import ByteGrad
from bagua_core.algorithms.gradient_allreduce import GradientAllreduce
from bagua_core.communication.communicator import Communicator
from bagua_core.communication.compressed.compressed_sum import LEAST_ELEMENTS
from bagua_core.communication.reduction.bucket_buffer import Bucket
from bagua_core.communication.reduction.buckets import GradientSpec, plan_buckets
from bagua_core.model.sharded_tensors import WHOLE, Sharding
from tests.core.algorithms.gradient_ranks import world_on_nodes
from tests.core.communication.worlds import FakeEngine, run_ranks

ELEMENTS = 2 * LEAST_ELEMENTS
REPLICA_SIZE = 2
REPLICATED, SHARD = Sharding((0, 1), (2,), ()), Sharding((0, 1), (2,), (0,))
# three replicas of two workers on two nodes: the workers of replica 1 are on different ones
LANES = ((2, 1), (1, 2))
ONE_NODE = (3,)

ALGORITHMS = [GradientAllreduce(hierarchical=True), ByteGrad(hierarchical=True)]


class EngineOfShards(FakeEngine):
    @property
    def replica_size(self) -> int:
        return REPLICA_SIZE


def contribution(global_rank: int) -> torch.Tensor:
    return torch.randn(ELEMENTS, generator=torch.Generator().manual_seed(global_rank))


def reduced(
    nodes: Sequence[int],
    sharding: Sharding,
    algorithm: GradientAllreduce | ByteGrad,
    job_has_one_node: bool = False,
) -> torch.Tensor:
    """The same gradients on each rank, whatever its node."""
    spec = GradientSpec(ELEMENTS, torch.float32, torch.device("cpu"), sharding)
    (plan,) = plan_buckets([spec])

    def act(lane: Communicator) -> torch.Tensor:
        bucket = Bucket(plan, [torch.zeros(ELEMENTS)], with_tail=False)
        bucket.flat.copy_(contribution(lane.global_rank))
        operation = algorithm.operation(Attachment((), (), EngineOfShards(lane), 1 << 20))
        operation.launch(lane, bucket, 0, 1.0).wait()
        return bucket.flat

    world = world_on_nodes(nodes)
    for each in world:
        each.job_has_one_node = job_has_one_node
    first, *others = run_ranks(world, act)
    assert all(torch.equal(first, other) for other in others)
    return first


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=["plain", "compressed"])
@pytest.mark.parametrize("sharding", [WHOLE, REPLICATED], ids=["whole", "replicated"])
def test_what_mates_hold_has_the_same_bits(
    sharding: Sharding, algorithm: GradientAllreduce | ByteGrad
) -> None:
    one, other = (reduced(nodes, sharding, algorithm) for nodes in LANES)
    assert torch.equal(one, other)


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=["plain", "compressed"])
def test_shards_are_summed_by_node(algorithm: GradientAllreduce | ByteGrad) -> None:
    one, other = (reduced(nodes, SHARD, algorithm) for nodes in LANES)
    assert not torch.equal(one, other)


@pytest.mark.parametrize("sharding", [WHOLE, REPLICATED, SHARD], ids=["whole", "replicated", "shard"])
def test_a_job_on_one_node_compresses_nothing(sharding: Sharding) -> None:
    exact = contribution(0) + contribution(1) + contribution(2)
    total = reduced(ONE_NODE, sharding, ByteGrad(hierarchical=True), job_has_one_node=True)
    torch.testing.assert_close(total, exact)


def test_a_lane_on_one_node_of_several_compresses_what_the_other_lanes_compress() -> None:
    one, other = (reduced(nodes, WHOLE, ByteGrad(hierarchical=True)) for nodes in (ONE_NODE, LANES[0]))
    assert torch.equal(one, other)
