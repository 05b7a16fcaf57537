"""The parts of sharded replicas by themselves: rows of replicas, lanes of shards, agreements, refusals."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from bagua_contract.records import StateName
from bagua_contract.replica import Replica, ReplicaMember
from bagua_contract.step_settings import QADAM_TAKES_NO_SHARDS, StepSettings
from bagua_core.algorithms import Attachment, GradientAllreduce, QAdamOptimizer, algorithm_names
from bagua_core.algorithms.tuned import cannot_take
from bagua_core.communication.communicator import Communicator, Lane
from bagua_core.communication.compressed.compressed_sum import CompressedSum
from bagua_core.communication.compressed.compression import MinMax
from bagua_core.communication.reduction.bucket_layout import BucketLayout
from bagua_core.communication.reduction.buckets import GradientSpec, plan_buckets
from bagua_core.communication.reduction.operation_queue import OperationQueue
from bagua_core.communication.topology import lanes
from bagua_core.communication.weights.weight_buckets import FlatWeights
from bagua_core.elastic.heal.heal_plan import HealPlan
from bagua_core.elastic.membership.entry import Info, exchange, of_replica
from bagua_core.elastic.replica import refusals
from bagua_core.elastic.replica.own_replica import Outcome, OwnReplica
from bagua_core.elastic.replica.refusals import NoReplicaYet, NotForReplicas
from bagua_core.elastic.state.committed_state import Remains
from bagua_core.model.sharded_modules import (
    AccumulatedOverSteps,
    check_unsynchronized,
    drop_unsynchronized,
)
from bagua_core.model.sharded_tensors import WHOLE, Sharding
from tests.core.algorithms.gradient_ranks import assert_equal_bits
from tests.core.communication.in_process import build_in_process
from tests.core.communication.worlds import FakeEngine, run_ranks
from tests.core.elastic.records import generation

SHARD = Sharding((0, 1), (2,), (0,))


def info(generation_number: int = 0, step: int = 0, **more: Any) -> Info:
    return Info(StateName(generation_number, step), False, {"epoch": 0, "batch": step}, **more)


# -- rows


def test_a_replica_has_what_all_of_its_shards_have() -> None:
    whole = of_replica([info(3, 8), info(3, 8)], [1, 1])
    assert whole.name == StateName(3, 8)
    assert of_replica([info(3, 8), info(3, 7)], [1, 1]).name == StateName(3, 7)
    assert of_replica([info(3, 8), info()], [1, 1]).name.is_none
    # a shard that was away counts as without any
    assert of_replica([info(3, 8), info(3, 8)], [1, 4]).name.is_none


def test_what_holds_for_one_shard_holds_for_its_replica() -> None:
    one = info(3, 8, stages=False, remains=Remains.HALF_COMMITTED, joining=True, kept=True, layout=5, run=2)
    for shards in ([one, info(3, 8, layout=7)], [info(3, 8, layout=7), one]):
        row = of_replica(shards, [1, 1])
        assert (row.stages, row.remains, row.joining, row.kept) == (False, Remains.HALF_COMMITTED, True, True)
        assert row.run == 2
    same = of_replica([info(3, 8, layout=5), info(3, 8, layout=7)], [1, 1])
    assert same.layout == of_replica([info(2, 1, layout=5), info(2, 1, layout=7)], [1, 1]).layout
    assert same.layout != of_replica([info(3, 8, layout=7), info(3, 8, layout=5)], [1, 1]).layout
    assert 0 <= same.layout < 2**63, "it fits a row"


def drawn(rows: list[Info], since: dict[str, int] | int = 1) -> list[tuple[HealPlan, list[Info]]]:
    record = generation(4, *(f"w{r}" for r in range(len(rows))), since=since)
    world = build_in_process(len(rows), 4)
    return run_ranks(
        world, lambda c: exchange(c, record, rows[c.global_rank], lambda pending: pending.wait(), 2)
    )


def test_shards_heal_by_one_plan_of_replicas() -> None:
    """A replica that has the step, one of which a shard has it not, and a newcomer."""
    rows = [info(3, 8), info(3, 8), info(3, 8), info(3, 7), info(), info()]
    plans = drawn(rows)
    assert len({repr(plan) for plan, _ in plans}) == 1
    plan, infos = plans[0]
    assert (plan.holders, plan.at_once, plan.newcomers) == ((0,), frozenset({1}), frozenset({2}))
    assert len(infos) == 3


def test_without_any_step_the_first_replica_gives_each_shard() -> None:
    plan, _ = drawn([info()] * 4)[0]
    assert (plan.initial, plan.holders, plan.at_once) == (True, (0,), frozenset({1}))


# -- lanes


def test_the_lanes_of_shards() -> None:
    places = [SimpleNamespace(replica_rank=r // 2, shard_rank=r % 2) for r in range(6)]
    assert lanes.of_shard(places, 2) == (0, 2, 4)
    assert lanes.of_shard(places, 5) == (1, 3, 5)
    alone = [SimpleNamespace(replica_rank=r, shard_rank=0) for r in range(3)]
    assert lanes.of_shard(alone, 1) is None
    nodes = ((0, 1, 2, 3), (4, 5))
    assert lanes.among(nodes, (1, 3, 5)) == ((0, 1), (2,))
    assert lanes.members_of(Lane.BACKGROUND, nodes, 3, (1, 3, 5)) == (1, 3, 5)
    assert lanes.members_of(Lane.NODE, nodes, 3, (1, 3, 5)) == (1, 3)
    assert lanes.members_of(Lane.LEADERS, nodes, 5, (1, 3, 5)) == (1, 5)


# -- agreements


def replicas(size: int) -> list[OwnReplica]:
    members = tuple(ReplicaMember(f"w{s}", f"a{s}", f"n{s}", 0, "127.0.0.1:1") for s in range(size))
    record = Replica("r0", members)
    return [OwnReplica(record, c.global_rank, c) for c in build_in_process(size)]


@pytest.mark.parametrize(
    ("outcomes", "found"),
    [
        ([Outcome.DONE, Outcome.DONE, Outcome.DONE], Outcome.DONE),
        ([Outcome.DONE, Outcome.MOVES, Outcome.DONE], Outcome.MOVES),
        ([Outcome.FAILED, Outcome.MOVES, Outcome.DONE], Outcome.FAILED),
    ],
)
def test_the_worst_outcome_is_that_of_the_replica(outcomes: list[Outcome], found: Outcome) -> None:
    agreed = run_ranks(replicas(3), lambda r: r.agree(outcomes[r.shard_rank], lambda p: p.wait()))
    assert agreed == [found] * 3


# -- refusals


def test_what_does_not_work_with_replicas_is_refused() -> None:
    plain = [torch.nn.Parameter(torch.zeros(2))]
    with pytest.raises(NotForReplicas, match="fully_shard"):
        refusals.check_model("gradient_allreduce", plain, 2)
    for name in sorted({*algorithm_names(), "hook", "one_of_the_script"} - set(refusals.ALGORITHMS)):
        with pytest.raises(NotForReplicas, match=f"algorithm {name} does not act on the shards"):
            refusals.check_model(f"{name}, 1 of 2 parameters frozen (ab)", plain, 2)
    with pytest.raises(NoReplicaYet, match="init_process_group"):
        refusals.check_assembled(2, is_assembled=False)
    refusals.check_assembled(2, is_assembled=True)
    refusals.check_assembled(1, is_assembled=False)


def test_the_manual_names_the_algorithms_that_act_on_shards() -> None:
    line = f"- The algorithms `{'`, `'.join(refusals.ALGORITHMS[:-1])}` and `{refusals.ALGORITHMS[-1]}` act on shards."
    assert line in (Path(__file__).parents[4] / "docs" / "sharded-models.md").read_text()


def test_rows_without_replicas_stay_as_they_are() -> None:
    row = info(3, 8, layout=9)
    assert of_replica([row], [9]) is row
    assert replace(row) == row


def test_a_model_of_shards_cannot_switch_to_qadam() -> None:
    parameters = parameters_of(0)
    attachment = Attachment(tuple(parameters), [QAdamOptimizer(parameters)], FakeEngine(), 1 << 20)
    settings = StepSettings(algorithm="qadam")
    why = cannot_take(GradientAllreduce(), settings, attachment, wraps_frozen=False)
    assert why == QADAM_TAKES_NO_SHARDS


# -- what does not lie in local tensors


@pytest.mark.parametrize("shared", [WHOLE, replace(SHARD, dimensions=())], ids=["plain", "replicated"])
def test_gradients_that_mates_hold_share_no_bucket_with_shards(shared: Sharding) -> None:
    """The places of shared ones, and so the order of their sums, are the same beside shards of any sizes."""
    cpu = torch.device("cpu")

    def shared_ones(shard: int) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
        specs = [
            GradientSpec(n, torch.float32, cpu, sharding)
            for n, sharding in ((7, shared), (shard, SHARD), (5, shared))
        ]
        return [(p.members, p.offsets) for p in plan_buckets(specs) if p.sharding == shared]

    assert shared_ones(3) == shared_ones(4000) == [((2, 0), (0, 5))]


def parameters_of(shard_rank: int) -> list[torch.nn.Parameter]:
    """The sharded weight and the replicated bias of a RowwiseParallel layer, as this worker of a replica of two has
    them. Both are compressed."""
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=shard_rank, world_size=2)
    try:
        mesh = init_device_mesh("cpu", (2,))
        return [
            torch.nn.Parameter(DTensor.from_local(torch.zeros(rows, 64), mesh, [placement], run_check=False))
            for rows, placement in ((512, Shard(1)), (300, Replicate()))
        ]
    finally:
        torch.distributed.destroy_process_group()


def test_a_compressed_sum_of_a_replicated_gradient_has_the_same_bits_on_both_mates() -> None:
    def reduced(shard_rank: int) -> list[torch.Tensor]:
        parameters = parameters_of(shard_rank)

        def act(lane: Communicator) -> torch.Tensor:
            layout = BucketLayout(parameters, 1 << 30, 1 << 30, tail_rides=True, replica_size=2)
            for view, seed in zip(
                layout.views, (10 * shard_rank + lane.global_rank, lane.global_rank), strict=True
            ):
                view.copy_(torch.randn(view.shape, generator=torch.Generator().manual_seed(seed)))
            operation = CompressedSum(OperationQueue(), MinMax(), hierarchical=False)
            for number, bucket in enumerate(layout.buckets):
                operation.launch(lane, bucket, number, 0.5).wait()
            return layout.views[1]

        return run_ranks(build_in_process(2), act)

    assert_equal_bits([reduced(0), reduced(1)])


def test_only_a_bucket_of_shards_carries_the_tail() -> None:
    """Of two mates whose shards differ in size, the bucket of replicated gradients may be the last one on one alone."""
    weight, bias = parameters_of(0)
    for parameters, last_carries in (([weight, bias], True), ([bias, weight], False)):
        layout = BucketLayout(parameters, 1 << 30, 1 << 30, tail_rides=True, replica_size=2)
        assert [bucket.tail is not None for bucket in layout.buckets] == [False, last_carries]
        assert (layout.lone_tail is None) == last_carries


def test_weights_that_mates_hold_share_no_buffer_with_shards() -> None:
    flats = FlatWeights(parameters_of(0)).flats
    assert [flat.numel() for flat in flats] == [512 * 64, 300 * 64]


def test_gradients_that_an_earlier_step_left_in_the_model_are_refused() -> None:
    left = SimpleNamespace(unsharded_accumulated_grad=torch.ones(1))
    in_parameter = SimpleNamespace(
        unsharded_accumulated_grad=None, _unsharded_param=SimpleNamespace(grad=torch.ones(1))
    )
    for parameter in (left, in_parameter):
        state = SimpleNamespace(_fsdp_param_groups=[SimpleNamespace(fsdp_params=[parameter])])
        modules: list[Any] = [SimpleNamespace(_get_fsdp_state=lambda state=state: state)]
        with pytest.raises(AccumulatedOverSteps, match="Accumulate within one step"):
            check_unsynchronized(modules)
        drop_unsynchronized(modules)
        check_unsynchronized(modules)
