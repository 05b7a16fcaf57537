"""Gradients in eight bits: how far from the mean, the same on all ranks, and nothing left of what did not happen."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from bagua_core.algorithms import ByteGrad, GradientAllreduce, find_algorithm
from bagua_core.algorithms.algorithm import Algorithm
from bagua_core.communication.communicator import Communicator, Lane, Pending
from bagua_core.communication.compressed.compressed_sum import LEAST_ELEMENTS
from bagua_core.communication.reduction.reducer import Reducer
from bagua_core.communication.step_interface import MicroBatch
from bagua_core.parallel import DistributedDataParallel
from tests.core.algorithms.gradient_ranks import (
    BUCKET_CAP_MB,
    SAMPLES,
    Rank,
    assert_equal_bits,
    break_at,
    exact,
    gradients,
    loss_of,
    net,
    shares,
    small_last,
    world_on_nodes,
)
from tests.core.communication.worlds import gloo_world, in_process_world, run_ranks, seeded


def ranks(world: list[Communicator], algorithm: Algorithm | None = None, **keywords: object) -> list[Rank]:
    return [Rank(c, algorithm or ByteGrad(), **keywords) for c in world]  # type: ignore[arg-type]


def assert_within_bounds(found: list[torch.Tensor], member: Rank, parties: list[list[int]]) -> None:
    """parties: whose contributions are summed before they are compressed. The bound is half a step of a grid over all
    values; those of the blocks are finer."""
    mean, parts = exact(member, sum(len(p) for p in parties))
    flat = [torch.cat([g.float().reshape(-1) for g in of_rank]) for of_rank in parts]
    sums = [torch.stack([flat[r] for r in party]).sum(0) for party in parties]
    whole = torch.stack(sums).sum(0)
    bound = (sum(span(s) for s in sums) + 1.1 * span(whole)) / 510
    for place, (got, want) in enumerate(zip(found, mean, strict=True)):
        assert got.dtype == member.parameters()[place].dtype
        slack = 8 * torch.finfo(got.dtype).eps * max(float(s.abs().max()) for s in sums)
        off = float((got.float() - want).abs().max())
        assert off <= bound + slack, f"parameter {place} is {off} off the mean, more than {bound + slack}"


def span(values: torch.Tensor) -> float:
    return float(values.max().clamp(min=0) - values.min().clamp(max=0))


def without_first_layer() -> nn.Module:
    """Frozen when it is wrapped; its bucket is compressed."""
    made = net()
    made[0].requires_grad_(False)  # type: ignore[index]
    return made


@pytest.mark.parametrize("nodes", [[1, 1], [2, 1]], ids=str)
def test_a_layer_that_is_unfrozen_is_compressed_in_the_same_step(nodes: list[int]) -> None:
    members = ranks(world_on_nodes(nodes), build=without_first_layer)
    parties = [[0, 1], [2]] if len(members) == 3 else [[0], [1]]
    run_ranks(members, lambda r: r.step())
    for member in members:
        member.inner[0].requires_grad_(True)  # type: ignore[index]
    for _ in range(3):  # later all of it is laid out anew
        exact_one = Rank(None, GradientAllreduce())
        exact_one.inner.load_state_dict(members[0].inner.state_dict())
        run_ranks(members, lambda r: r.backward())
        assert_equal_bits([m.gradients() for m in members])
        assert len(members[0].gradients()) == 6
        assert_within_bounds(members[0].gradients(), exact_one, parties)
        mean, _ = exact(exact_one, len(members))
        assert not torch.equal(members[0].gradients()[0], mean[0]), "it is compressed"
        for member in members:
            member.optimizer.step()
            member.model.step_committed()
            member.engine.step += 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", [2, 3, 5])
def test_the_mean_within_what_eight_bits_lose(size: int, dtype: torch.dtype) -> None:
    members = ranks(in_process_world(size), dtype=dtype)
    exchange: Any = members[0].model._exchange
    elements = [bucket.flat.numel() for bucket, _ in exchange.buckets_of_parameters()]
    assert min(elements) < LEAST_ELEMENTS < max(elements), "compressed and uncompressed buckets"
    run_ranks(members, lambda r: r.backward())
    assert_equal_bits([m.gradients() for m in members])
    assert_within_bounds(
        members[0].gradients(), Rank(None, ByteGrad(), dtype=dtype), [[r] for r in range(size)]
    )
    mean, _ = exact(Rank(None, ByteGrad(), dtype=dtype), size)
    assert any(not torch.equal(a.float(), b) for a, b in zip(members[0].gradients(), mean, strict=True))


def test_over_gloo_too() -> None:
    members = ranks(list(gloo_world(3)))
    for _ in range(3):
        assert run_ranks(members, lambda r: r.step()) == [True] * 3
        assert_equal_bits([m.parameters() for m in members])
    same = ranks(in_process_world(3))
    for _ in range(3):
        run_ranks(same, lambda r: r.step())
    # tiny buckets are added up in another order, after which a value may be rounded to the next code
    for a, b in zip(members[0].parameters(), same[0].parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-4)


def test_a_share_of_nothing_counts_nothing() -> None:
    members = ranks(in_process_world(3))
    for member, share in zip(members, [(0, 10), (10, 24), (24, 24)], strict=True):
        member.bring(member.engine.communicator(), share)
    run_ranks(members, lambda r: r.backward())
    assert_equal_bits([m.gradients() for m in members])
    other = ranks(in_process_world(3))
    run_ranks(other, lambda r: r.backward())
    for a, b in zip(members[0].gradients(), other[0].gradients(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0.02 * float(b.abs().max()) + 1e-6)


def test_micro_batches_and_gradients_kept_local() -> None:
    size = 3
    members = ranks(in_process_world(size))

    def act(r: Rank) -> None:
        begin, end = shares(size)[r.global_rank]
        r.inner.zero_grad()
        parts = [(begin, begin + 1), (begin + 1, end)]
        for number, (b, e) in enumerate(parts):
            r.engine.begin_micro_batch(MicroBatch((e - b) / SAMPLES, number == 1))
            loss_of(r.model, b, e).backward()
        assert len(r.engine.pairs) == 1

    run_ranks(members, act)
    assert_equal_bits([m.gradients() for m in members])
    assert_within_bounds(members[0].gradients(), Rank(None, ByteGrad()), [[0], [1], [2]])

    def local_then_shared(r: Rank) -> list[torch.Tensor]:
        r.bring(r.engine.communicator(), None)
        r.inner.zero_grad()
        with r.model.no_sync():
            loss_of(r.model, *r.share).backward()
        before = len(r.engine.pairs)
        loss_of(r.model, *r.share).backward()
        assert len(r.engine.pairs) == before + 1
        return [g / 2 for g in r.gradients()]

    doubled = run_ranks(members, local_then_shared)
    assert_equal_bits(doubled)
    assert_within_bounds(doubled[0], Rank(None, ByteGrad()), [[0], [1], [2]])


@pytest.mark.parametrize(
    ("build", "dtype"),
    [(net, torch.float32), (small_last, torch.float32), (net, torch.float16)],
    ids=["compressed", "tiny", "alone"],
)
@pytest.mark.parametrize("nodes", [[1, 1, 1], [2, 1]], ids=["flat", "nodes"])
def test_the_pair_is_exact(build: object, dtype: torch.dtype, nodes: list[int]) -> None:
    members = ranks(world_on_nodes(nodes), build=build, dtype=dtype)
    reducer = members[0].model._exchange
    assert isinstance(reducer, Reducer)
    last = reducer._buckets[-1]
    assert (last.tail is not None) == (dtype == torch.float32)
    if dtype == torch.float32:
        assert (last.plan.elements >= LEAST_ELEMENTS) == (build is net)

    def act(r: Rank) -> None:
        for values in ([1.0, 2.0, 5.0], [0.0, 0.0, 0.0], [3.0, 3.0, 3.0]):
            r.engine.v = values[r.global_rank]
            r.step()

    run_ranks(members, act)
    assert all(m.engine.pairs == [(8.0, 30.0), (0.0, 0.0), (9.0, 27.0)] for m in members)


@pytest.mark.parametrize("nodes", [[2, 2], [1, 3], [2, 1, 1], [3]], ids=str)
def test_workers_of_a_node_are_summed_first(nodes: list[int]) -> None:
    world = world_on_nodes(nodes)
    begins = [sum(nodes[:i]) for i in range(len(nodes))]
    started: list[str] = []
    for c in world:
        for lane, communicator in [("main", c), *((k.value, v) for k, v in c.lanes.items())]:
            for what in ("alltoall", "allgather"):

                def noted(
                    *args: object, _real: object = getattr(communicator, what), _at: str = lane
                ) -> object:
                    started.append(_at)
                    return _real(*args)  # type: ignore[operator]

                setattr(communicator, what, noted)
    members = ranks(world)
    assert members[0].model.lanes == {Lane.NODE, Lane.LEADERS}
    for _ in range(2):
        run_ranks(members, lambda r: r.backward())
        assert_equal_bits([m.gradients() for m in members])
        parties = [list(range(b, b + n)) for b, n in zip(begins, nodes, strict=True)]
        assert_within_bounds(members[0].gradients(), Rank(None, ByteGrad()), parties)
    assert set(started) == (set() if len(nodes) == 1 else {"leaders"})


def test_flat_where_it_is_asked_for() -> None:
    members = ranks(world_on_nodes([2, 1]), ByteGrad(hierarchical=False))
    assert not members[0].model.lanes
    run_ranks(members, lambda r: r.backward())
    assert_equal_bits([m.gradients() for m in members])
    assert_within_bounds(members[0].gradients(), Rank(None, ByteGrad()), [[0], [1], [2]])


@pytest.mark.parametrize("algorithm", [ByteGrad, GradientAllreduce])
def test_the_sum_instead_of_the_mean(algorithm: type[ByteGrad] | type[GradientAllreduce]) -> None:
    world = world_on_nodes([2, 1])
    mean = ranks(world, algorithm(hierarchical=True))
    total = ranks(world_on_nodes([2, 1]), algorithm(hierarchical=True, average=False))

    def act(r: Rank) -> list[torch.Tensor]:
        r.backward()
        first = r.gradients()
        loss_of(r.model, *r.share).backward()  # without zero_grad: on top of what is there
        for a, b in zip(first, r.gradients(), strict=True):
            torch.testing.assert_close(2 * a, b, rtol=0, atol=0.03 * float(a.abs().max()) + 1e-6)
        return first

    means, totals = run_ranks(mean, act), run_ranks(total, act)
    assert_equal_bits(totals)
    for a, b in zip(means[0], totals[0], strict=True):
        torch.testing.assert_close(3 * a, b, rtol=1e-5, atol=0.02 * float(b.abs().max()) + 1e-6)


FLAT, NODES = [1, 1, 1], [2, 1, 1]
STAGES = [
    *[(FLAT, what, rank) for what in ("allreduce", "alltoall", "allgather") for rank in (0, 1)],
    *[(NODES, what, 0) for what in ("allreduce", "reduce", "alltoall", "allgather", "broadcast")],
    *[(NODES, what, 1) for what in ("allreduce", "reduce", "broadcast")],  # the second of its node
]


@pytest.mark.parametrize(("nodes", "what", "breaks"), STAGES, ids=str)
@pytest.mark.parametrize("number", [1, 2])
def test_nothing_is_left_of_a_step_that_broke(nodes: list[int], what: str, number: int, breaks: int) -> None:
    if what == "allreduce":
        number = 1  # of the tiny bucket
    world = world_on_nodes(nodes)
    members = ranks(world)
    run_ranks(members, lambda r: r.step())
    before = [m.parameters() for m in members]
    happened = break_at(world, what, number, breaks)
    done = run_ranks(members, lambda r: r.step())
    assert happened.is_set() and not all(done)
    for member, was, stepped in zip(members, before, done, strict=True):
        if not stepped:
            assert_equal_bits([member.parameters(), was])
            assert all(not g.any() for g in member.gradients())
    behind = [m for m, stepped in zip(members, done, strict=True) if not stepped]
    again = world_on_nodes([1] * len(behind), 2)
    for member, communicator in zip(behind, again, strict=True):
        member.move_to(communicator)
    fresh = ranks(in_process_world(len(behind)))
    for member in fresh:
        with torch.no_grad():
            for p, was in zip(member.inner.parameters(), before[0], strict=True):
                p.copy_(was)
    for _ in range(2):
        assert all(run_ranks(behind, lambda r: r.step()))
        run_ranks(fresh, lambda r: r.step())
    if len(behind) > 1:
        assert_equal_bits([m.parameters() for m in [*behind, *fresh]])


def end_after_first_sum(communicator: Communicator) -> None:
    """Its generation ends once it has started one allreduce."""
    original = communicator.allreduce

    def start(*arguments: Any) -> Pending:
        pending = original(*arguments)
        communicator.abort("the generation is over")
        return pending

    communicator.allreduce = start  # type: ignore[method-assign]


def test_what_was_given_up_writes_into_unused_memory() -> None:
    old = in_process_world(2)
    here, late = ranks(old)
    for communicator in old:
        end_after_first_sum(communicator)
    assert not here.step()
    here.move_to(in_process_world(1, 2)[0])
    assert here.step()
    state = [*here.parameters(), *here.gradients()]
    assert not late.step()  # but the tiny bucket's sum is complete now, and was written on both ranks
    assert_equal_bits([state, [*here.parameters(), *here.gradients()]])


def test_generations_of_other_sizes() -> None:
    members = ranks(in_process_world(3))
    run_ranks(members, lambda r: r.step())
    for generation, size in enumerate([2, 4, 1, 3], start=2):
        kept = members[:size]
        world: list[Communicator | None] = list(in_process_world(size, generation)) if size > 1 else [None]
        joined = [Rank(None, ByteGrad()) for _ in range(size - len(kept))]
        for member in joined:
            member.inner.load_state_dict(kept[0].inner.state_dict())
            member.engine.step = kept[0].engine.step
        members = kept + joined
        for member, communicator in zip(members, world, strict=True):
            member.move_to(communicator)
        for _ in range(2):
            assert all(run_ranks(members, lambda r: r.step()))
            assert_equal_bits([m.parameters() for m in members])


class TwoModels:
    """Trained by one loss, so that buckets of both leave in one backward."""

    def __init__(self, communicator: Communicator) -> None:
        self.first = Rank(communicator, ByteGrad())
        self.second = seeded(small_last)
        self.model = DistributedDataParallel(
            self.second, None, algorithm=ByteGrad(), bucket_cap_mb=BUCKET_CAP_MB, engine=self.first.engine
        )

    def gradients(self) -> list[torch.Tensor]:
        share = self.first.share
        (loss_of(self.first.model, *share) + loss_of(self.model, *share)).backward()
        return [*self.first.gradients(), *gradients(self.second)]


def test_two_models_in_one_backward() -> None:
    members = [TwoModels(c) for c in in_process_world(3)]
    for _ in range(3):
        assert_equal_bits(run_ranks(members, lambda m: m.gradients()))
    assert len(members[0].first.engine.pairs) == 6
    assert_within_bounds(
        [g / 3 for g in members[0].first.gradients()], Rank(None, ByteGrad()), [[0], [1], [2]]
    )


def test_it_learns_as_well_as_without_compression() -> None:
    def trained(algorithm: Algorithm) -> float:
        members = ranks(
            in_process_world(3), algorithm, optimizer=lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9)
        )
        for _ in range(60):
            run_ranks(members, lambda r: r.step())
        with torch.no_grad():
            return float(loss_of(members[0].inner, 0, SAMPLES))

    with torch.no_grad():
        start = float(loss_of(Rank(None, ByteGrad()).inner, 0, SAMPLES))
    plain, compressed = trained(GradientAllreduce()), trained(ByteGrad())
    assert plain < start / 20
    assert abs(compressed - plain) < 0.01 * start


def test_it_is_found_by_name() -> None:
    assert isinstance(find_algorithm("bytegrad"), ByteGrad)
    assert ByteGrad().described == "bytegrad(hierarchical=True, average=True)"
    assert GradientAllreduce().described == "gradient_allreduce"
    assert GradientAllreduce(True).described != GradientAllreduce().described
