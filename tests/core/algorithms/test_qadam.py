"""Momentum in eight bits and one: equal on all ranks, near to Adam, nothing lost but with its rank."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from bagua_core.algorithms import QAdam, QAdamOptimizer, find_algorithm
from bagua_core.communication.communicator import Communicator
from bagua_core.communication.compressed.compressed_sum import CompressedSum
from bagua_core.communication.compressed.compression import WithFeedback
from bagua_core.communication.reduction.reducer import Reducer
from bagua_core.communication.step_interface import MicroBatch
from tests.core.algorithms.gradient_ranks import (
    SAMPLES,
    Branches,
    Rank,
    assert_equal_bits,
    break_at,
    loss_of,
    shares,
    steps_with,
    world_on_nodes,
)
from tests.core.communication.worlds import gloo_world, in_process_world, run_ranks

WARMUP = 3
BITS = pytest.mark.parametrize("bits", [8, 1])


def optimizer_for(parameters: Any, **more: Any) -> QAdamOptimizer:
    return QAdamOptimizer(parameters, lr=3e-3, warmup_steps=WARMUP, **more)


def rank(communicator: Communicator | None, bits: int = 8, **keywords: Any) -> Rank:
    keywords.setdefault("optimizer", optimizer_for)
    return Rank(communicator, QAdam(bits=bits), **keywords)


def ranks(world: Sequence[Communicator | None], bits: int = 8, **keywords: Any) -> list[Rank]:
    return [rank(c, bits, **keywords) for c in world]


def moments(member: Rank) -> list[torch.Tensor]:
    state = member.optimizer.state
    return [state[p][name].clone() for p in member.inner.parameters() for name in ("exp_avg", "exp_avg_sq")]


def assert_alike(members: Sequence[Rank]) -> None:
    assert_equal_bits([[*m.parameters(), *moments(m)] for m in members])


def steps(members: Sequence[Rank], count: int) -> None:
    for _ in range(count):
        assert all(run_ranks(members, lambda r: r.step()))
        assert_alike(members)


def reducer_of(member: Rank) -> Reducer:
    reducer = member.model._exchange
    assert isinstance(reducer, Reducer)
    return reducer


def buckets(member: Rank) -> int:
    return len(reducer_of(member)._buckets)


def compression(member: Rank) -> WithFeedback:
    operation = reducer_of(member)._operation
    assert isinstance(operation, CompressedSum)
    found = operation._compression
    assert isinstance(found, WithFeedback)
    return found


def counted(communicator: Communicator, what: str) -> list[int]:
    calls, original = [0], getattr(communicator, what)

    def start(*arguments: Any) -> Any:
        calls[0] += 1
        return original(*arguments)

    setattr(communicator, what, start)
    return calls


@BITS
def test_full_precision_in_the_warm_up_and_moments_after_it(bits: int) -> None:
    world = in_process_world(3)
    calls = counted(world[0], "alltoall")
    members, alone = ranks(world, bits), rank(None)
    steps(members, WARMUP + 1)
    assert calls == [0], "in the step after it the number of late elements is still on its way"
    for _ in range(WARMUP + 1):
        alone.step()
    for a, b in zip(members[0].parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    steps(members, 2)
    assert calls == [4]


@BITS
def test_a_layer_that_is_frozen_in_the_warm_up_does_not_hold_the_others_back(bits: int) -> None:
    world = in_process_world(2)
    calls = counted(world[0], "alltoall")
    members = ranks(world, bits)
    steps(members, 1)
    for member in members:
        member.inner[0].requires_grad_(False)
    kept = [p.clone() for p in members[0].inner[0].parameters()]
    steps(members, WARMUP + 2)
    assert calls[0] > 0 and not members[0].model.warms_up
    assert all(map(torch.equal, kept, members[0].inner[0].parameters()))
    for member in members:
        member.inner[0].requires_grad_(True)
    steps(members, WARMUP + 3)
    assert not any(map(torch.equal, kept, members[0].inner[0].parameters()))


def assert_near(
    found: list[torch.Tensor], wanted: list[torch.Tensor], member: Rank, of_range: float = 0.05
) -> None:
    """In units of Adam's step: eight bits of the range of the largest, for each rank and for the sum."""
    scales = [
        member.optimizer.state[p]["exp_avg_sq"].float().sqrt() + 1e-8 for p in member.inner.parameters()
    ]
    got, want = ([t.float() / scale for t, scale in zip(of, scales, strict=True)] for of in (found, wanted))
    bound = of_range * max(float(w.abs().max()) for w in want)
    for place, (g, w) in enumerate(zip(got, want, strict=True)):
        assert float((g - w).abs().max()) < bound, f"parameter {place}"


@pytest.mark.parametrize("size", [2, 3, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_gradient_by_which_adam_gets_what_was_agreed_on(size: int, dtype: torch.dtype) -> None:
    members = ranks(in_process_world(size), dtype=dtype)
    steps(members, WARMUP + 1)
    alone = rank(None, dtype=dtype)
    alone.inner.load_state_dict(members[0].inner.state_dict())
    alone.backward()
    run_ranks(members, lambda r: r.backward())
    assert_equal_bits([m.gradients() for m in members])
    assert_near(members[0].gradients(), alone.gradients(), members[0])


@BITS
def test_over_gloo_and_with_other_groups_too(bits: int) -> None:
    def groups(parameters: Any) -> QAdamOptimizer:
        first, *others = parameters
        return optimizer_for(
            [{"params": [first], "betas": (0.5, 0.9)}, {"params": others}], weight_decay=0.01
        )

    members = ranks(list(gloo_world(2)), bits, optimizer=groups)
    steps(members, WARMUP + 3)


@BITS
def test_shares_of_nothing_micro_batches_and_gradients_kept_local(bits: int) -> None:
    members = ranks(in_process_world(3), bits)
    steps(members, WARMUP)
    for member, share in zip(members, [(0, 10), (10, 24), (24, 24)], strict=True):
        member.bring(member.engine.communicator(), share)
    steps(members, 2)

    def in_parts(r: Rank) -> None:
        begin, end = shares(3)[r.global_rank]
        r.inner.zero_grad()
        for number, (b, e) in enumerate([(begin, begin + 1), (begin + 1, end)]):
            r.engine.begin_micro_batch(MicroBatch((e - b) / SAMPLES, number == 1))
            loss_of(r.model, b, e).backward()
        r.optimizer.step()

    run_ranks(members, in_parts)
    assert_alike(members)

    def local_first(r: Rank) -> None:
        r.bring(r.engine.communicator(), None)
        r.inner.zero_grad()
        with r.model.no_sync():
            loss_of(r.model, *r.share).backward()
        loss_of(r.model, *r.share).backward()
        r.optimizer.step()

    run_ranks(members, local_first)
    assert_alike(members)


@BITS
@pytest.mark.parametrize("warm", [True, False], ids=["after the warm-up", "within it"])
@pytest.mark.parametrize("nodes", [[1, 1, 1], [1, 2]], ids=["flat", "nodes"])
def test_one_that_heals_meanwhile_ends_alike(bits: int, warm: bool, nodes: list[int]) -> None:
    members = ranks(in_process_world(2), bits)
    steps(members, WARMUP + 2 if warm else 1)
    world = world_on_nodes(nodes, 2)
    newcomer = rank(None, bits)
    newcomer.engine.step = members[0].engine.step
    for place, (member, communicator) in enumerate(zip([*members, newcomer], world, strict=True)):
        member.move_to(communicator, (24, 24) if place == 2 else [(0, 10), (10, 24)][place])
        member.engine.healing = frozenset({2})
    kept = [copy.deepcopy(members[0].inner.state_dict()), copy.deepcopy(members[0].optimizer.state_dict())]
    usual: Callable[[Any], None] = newcomer.engine.reduction_done

    def copied_meanwhile(pair: tuple[float, float] | None) -> None:
        newcomer.inner.load_state_dict(kept[0])
        newcomer.optimizer.load_state_dict(kept[1])
        usual(pair)

    newcomer.engine.reduction_done = copied_meanwhile  # type: ignore[method-assign]
    everyone = [*members, newcomer]
    asked = counted(world[0], "allreduce")
    steps(everyone, 1)
    with_question = asked[0]
    newcomer.engine.reduction_done = usual  # type: ignore[method-assign]
    for member in everyone:
        member.engine.healing = frozenset()
        member.bring(member.engine.communicator(), None)
    steps(everyone, 1)
    # each bucket asks what the newcomer can't know yet
    assert asked[0] - with_question == with_question - buckets(members[0])
    steps(everyone, WARMUP)


def test_the_question_whether_the_warm_up_is_over_may_break_too() -> None:
    world = in_process_world(2)
    members = ranks(world)
    steps(members, WARMUP + 1)
    before = members[0].parameters()
    for member in members:
        member.engine.healing = frozenset({1})
    happened = break_at(world, "allreduce", 1)
    assert not any(run_ranks(members, lambda r: r.step()))
    assert happened.is_set()
    assert_equal_bits([before, *(m.parameters() for m in members)])
    for member, communicator in zip(members, in_process_world(2, 2), strict=True):
        member.engine.healing = frozenset()
        member.move_to(communicator)
    steps(members, 2)


@BITS
@pytest.mark.parametrize("what", ["alltoall", "allgather"])
@pytest.mark.parametrize("number", [1, 2])
def test_a_step_that_broke_is_done_again_as_if_nothing_had_been(bits: int, what: str, number: int) -> None:
    if what == "allgather":
        number = 1  # once a rank has the last sum the step may be final there
    world = in_process_world(3)
    members, steady = ranks(world, bits), ranks(in_process_world(3), bits)
    for several in (members, steady):
        steps(several, WARMUP + 2)
    happened = break_at(world, what, number)
    assert not any(run_ranks(members, lambda r: r.step()))
    assert happened.is_set()
    assert_equal_bits([[*m.parameters(), *moments(m)] for m in (members[0], steady[0])])
    for several in (members, steady):  # of a new generation
        for member, communicator in zip(several, in_process_world(3, 2), strict=True):
            member.move_to(communicator)
        steps(several, 3)
    assert_alike([members[0], steady[0]])


class HalfUsed(torch.nn.Module):
    """Half of the values, by which the gradients of the others are zero and stay late."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[:, ::2]


def branches_with_late_elements() -> torch.nn.Module:
    made = Branches()
    for branch in (made.a, made.b):
        branch[0], branch[1] = torch.nn.Linear(70, 602), HalfUsed()
    return made


@BITS
@pytest.mark.parametrize("build", [Branches, branches_with_late_elements])
def test_a_sum_that_is_discarded_changes_neither_momentum_nor_errors(
    bits: int, build: Callable[[], torch.nn.Module]
) -> None:
    """Of branch b, which has momentum and errors of compressed steps, or begins with the optimizer's."""

    def gradients(*branches: str) -> list[torch.Tensor]:
        def fixed(parameters: Any) -> QAdamOptimizer:
            return QAdamOptimizer(parameters, lr=0.0, warmup_steps=WARMUP)

        members = ranks(in_process_world(2), bits, build=build, optimizer=fixed, find_unused=True)
        steps_with(members, *["ab"] * (WARMUP + 1), *branches)
        assert all(p.grad is None for p in members[0].inner.a.parameters())  # type: ignore[union-attr]
        return members[0].gradients()

    assert_equal_bits([gradients("b", "a", "a", "b"), gradients("b", "b")])
    assert_equal_bits([gradients("a", "a", "b"), gradients("b")])


@BITS
def test_errors_of_a_step_that_was_reduced_and_then_failed_are_dropped(bits: int) -> None:
    """Another model's part of the step may fail behind it. The errors of before are overwritten by then."""
    members = ranks(in_process_world(2), bits)
    steps(members, WARMUP + 3)
    run_ranks(members, lambda r: r.backward())
    assert all(compression(m)._kept for m in members)
    for member, communicator in zip(members, in_process_world(2), strict=True):
        member.move_to(communicator)
    assert not any(compression(m)._kept for m in members)
    steps(members, 2)


@pytest.mark.parametrize("sizes", [[3, 2, 4], [2, 1, 3], [4, 3, 3]], ids=str)
@BITS
def test_generations_of_other_sizes(bits: int, sizes: list[int]) -> None:
    members = ranks(in_process_world(sizes[0]), bits)
    steps(members, WARMUP + 2)
    for generation, size in enumerate(sizes[1:], start=2):
        members = members[:size]
        while len(members) < size:
            joined = rank(None, bits)
            joined.inner.load_state_dict(copy.deepcopy(members[0].inner.state_dict()))
            joined.optimizer.load_state_dict(copy.deepcopy(members[0].optimizer.state_dict()))
            members.append(joined)
        world: Sequence[Communicator | None] = in_process_world(size, generation) if size > 1 else [None]
        for member, communicator in zip(members, world, strict=True):
            member.move_to(communicator)
        steps(members, 3)


def test_what_one_bit_lost_follows_its_rank_to_other_nodes() -> None:
    members = ranks(world_on_nodes([1, 1, 1]), bits=1)
    steps(members, WARMUP + 2)
    kept = [dict(compression(m)._kept) for m in members]
    assert all(e.worker.any() and e.owned.any() for of_rank in kept for e in of_rank.values())
    for member, communicator in zip(members, world_on_nodes([2, 1], 2), strict=True):
        member.move_to(communicator)
    steps(members, 1)
    assert [len(compression(m)._kept) for m in members] == [2, 0, 2], (
        "the second sends no compressed messages now"
    )
    steps(members, 1)


def test_loss_scaling_means_what_it_always_does() -> None:
    members = ranks(in_process_world(2))
    steps(members, WARMUP + 1)

    def gradients_with(scale: float) -> list[list[torch.Tensor]]:
        def act(r: Rank) -> list[torch.Tensor]:
            r.inner.zero_grad()
            (loss_of(r.model, *r.share) * scale).backward()
            return [g / scale for g in r.gradients()]

        return run_ranks(members, act)

    plain, scaled = gradients_with(1.0), gradients_with(256.0)
    assert_near(scaled[0], plain[0], members[0])


def test_an_infinite_gradient_is_seen_by_all() -> None:
    members = ranks(in_process_world(2))
    steps(members, WARMUP + 1)

    def act(r: Rank) -> bool:
        r.inner.zero_grad()
        (loss_of(r.model, *r.share) * (torch.inf if r.global_rank == 0 else 1.0)).backward()
        return all(bool(g.isfinite().all()) for g in r.gradients())

    assert run_ranks(members, act) == [False, False]


def test_after_an_infinite_gradient_one_bit_begins_anew() -> None:
    members = ranks(in_process_world(3), bits=1)
    steps(members, WARMUP + 2)

    def burst(r: Rank) -> bool:
        r.inner.zero_grad()
        (loss_of(r.model, *r.share) * (torch.inf if r.global_rank == 1 else 1.0)).backward()
        # No worker steps, as under a gradient scaler
        return all(bool(g.isfinite().all()) for g in r.gradients())

    assert run_ranks(members, burst) == [False, False, False]
    for _ in range(3):
        steps(members, 1)
        assert all(bool(t.isfinite().all()) for m in members for t in (*m.parameters(), *m.gradients()))


@BITS
def test_it_learns_as_adam_does(bits: int) -> None:
    def trained(build: Callable[[Any], torch.optim.Optimizer], world: Sequence[Communicator | None]) -> float:
        compressed = build is longer
        members = [
            Rank(c, QAdam(bits=bits) if compressed else find_algorithm("gradient_allreduce"), optimizer=build)
            for c in world
        ]
        for _ in range(80):
            run_ranks(members, lambda r: r.step())
        with torch.no_grad():
            return float(loss_of(members[0].inner, 0, SAMPLES))

    def longer(parameters: Any) -> QAdamOptimizer:
        return QAdamOptimizer(parameters, lr=1e-3, warmup_steps=20)

    with torch.no_grad():
        start = float(loss_of(rank(None).inner, 0, SAMPLES))
    exact = trained(lambda ps: torch.optim.Adam(ps, lr=1e-3), in_process_world(3))
    assert exact < start / 10
    assert trained(longer, in_process_world(3)) < exact + 0.05 * start


def test_what_does_not_fit_is_refused() -> None:
    assert isinstance(find_algorithm("qadam"), QAdam)
    assert QAdam(bits=1).described == "qadam(hierarchical=True, bits=1)"
    with pytest.raises(ValueError, match="bits=4; use 8 or 1"):
        QAdam(bits=4)
    with pytest.raises(ValueError, match=r"needs the model's QAdamOptimizer, and 0 were given"):
        Rank(None, QAdam())
    stranger = optimizer_for([torch.nn.Parameter(torch.zeros(1))])
    with pytest.raises(ValueError, match="none of the model's"):
        rank_with = Rank(None, QAdam(stranger), optimizer=optimizer_for)
        assert rank_with
    with pytest.raises(ValueError, match=r"\d of the model's parameters are not"):
        Rank(None, QAdam(), optimizer=lambda ps: optimizer_for([next(iter(ps))]))
    Rank(None, lambda optimizer: QAdam(optimizer), optimizer=optimizer_for)  # type: ignore[arg-type,return-value]
