"""Any compressor in ByteGrad's exchange: equal bits on all ranks, error feedback, and the built-in formats by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from bagua_core.algorithms import ByteGrad, CompressedAllreduce, Compressor, GradientAllreduce
from bagua_core.algorithms.algorithm import Algorithm
from bagua_core.communication.communicator import CollectiveFailed
from bagua_core.communication.compressed import compressor as compressors
from bagua_core.communication.compressed.compressor import UnknownCompressorError
from tests.core.algorithms.gradient_ranks import (
    Branches,
    Rank,
    assert_equal_bits,
    break_at,
    exact,
    steps_with,
    world_on_nodes,
)
from tests.core.communication.worlds import gloo_world, in_process_world, run_ranks


class Signs(Compressor):
    """One byte a value, its sign, and the row's mean magnitude."""

    name = "signs"

    def size_bytes(self, count: int) -> int:
        return count + 5  # odd, so that rows begin anywhere

    def compress(self, values: torch.Tensor, out: torch.Tensor) -> None:
        means = values.float().abs().mean(1, keepdim=True)
        out[:, :4] = means.view(torch.uint8)
        out[:, 4] = 0
        out[:, 5:] = (values.sign() + 1).to(torch.uint8)

    def decompress(self, compressed: torch.Tensor, count: int) -> torch.Tensor:
        means = compressed[:, :4].clone(memory_format=torch.contiguous_format).view(torch.float32)
        return (compressed[:, 5 : 5 + count].float() - 1) * means


def gradients_of(algorithm: Algorithm, size: int = 2, steps: int = 1) -> list[list[torch.Tensor]]:
    """Rank 0's, of the same backward again and again."""
    members = [Rank(c, algorithm) for c in in_process_world(size)]
    found = []
    for _ in range(steps):
        run_ranks(members, lambda r: r.backward())
        assert_equal_bits([m.gradients() for m in members])
        found.append(members[0].gradients())
    return found


@pytest.mark.parametrize("feedback", [False, True])
@pytest.mark.parametrize("size", [2, 3, 5])
def test_all_ranks_get_the_same_bits(size: int, feedback: bool) -> None:
    members = [Rank(c, CompressedAllreduce(Signs(), feedback)) for c in gloo_world(size)]
    for _ in range(3):
        assert run_ranks(members, lambda r: r.step()) == [True] * size
        assert_equal_bits([m.parameters() for m in members])


def test_with_feedback_the_mean_over_steps_approaches_the_gradient() -> None:
    wanted, _ = exact(Rank(None, GradientAllreduce()), 2)
    steps = 60

    def off(feedback: bool) -> float:
        found = gradients_of(CompressedAllreduce(Signs(), feedback), steps=steps)
        means = [torch.stack(each).mean(0) for each in zip(*found, strict=True)]
        return sum(
            float((mean - want).norm() / want.norm()) for mean, want in zip(means, wanted, strict=True)
        )

    assert off(True) < off(False) / 3


@pytest.mark.parametrize("feedback", [False, True])
def test_a_failed_step_is_repeated_with_the_errors_that_it_began_with(feedback: bool) -> None:
    world = list(in_process_world(2))
    members = [Rank(c, CompressedAllreduce(Signs(), feedback)) for c in world]
    run_ranks(members, lambda r: r.step())
    happened = break_at(world, "alltoall", 1)
    assert run_ranks(members, lambda r: r.step()) == [False, False] and happened.is_set()
    for member, communicator in zip(members, in_process_world(2), strict=True):
        member.move_to(communicator)
    undisturbed = [Rank(c, CompressedAllreduce(Signs(), feedback)) for c in in_process_world(2)]
    run_ranks(undisturbed, lambda r: r.step())
    for ranks in (members, undisturbed):
        assert run_ranks(ranks, lambda r: r.step()) == [True, True]
    assert_equal_bits([members[0].parameters(), undisturbed[0].parameters()])


def branch_gradients(*branches: str) -> list[torch.Tensor]:
    """Of branch b in its last step, after steps with these branches that change no weights."""

    def fixed(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.0)

    algorithm = CompressedAllreduce("one_bit")
    members = [Rank(c, algorithm, Branches, optimizer=fixed, find_unused=True) for c in in_process_world(2)]
    steps_with(members, *branches)
    assert all(p.grad is None for p in members[0].inner.a.parameters())  # type: ignore[union-attr]
    return members[0].gradients()


def test_a_sum_that_is_discarded_changes_no_errors() -> None:
    assert_equal_bits([branch_gradients("b", "a", "a", "a", "b"), branch_gradients("b", "b")])
    first, second = branch_gradients("b"), branch_gradients("b", "b")
    assert not all(map(torch.equal, first, second)), "errors count"


def with_errors() -> list[Rank]:
    """Two members after a step: each keeps what it could not send."""
    members = [Rank(c, CompressedAllreduce(Signs())) for c in in_process_world(2)]
    assert run_ranks(members, lambda r: r.step()) == [True, True]
    return members


def fresh_like(rank: Rank) -> Rank:
    """A new process that holds the state of `rank`."""
    fresh = Rank(None, CompressedAllreduce(Signs()))
    copy_state(rank, fresh)
    return fresh


def copy_state(source: Rank, to: Rank) -> None:
    to.inner.load_state_dict(source.inner.state_dict())
    to.optimizer.load_state_dict(source.optimizer.state_dict())
    to.engine.step = source.engine.step


def next_step(members: list[Rank]) -> list[torch.Tensor]:
    """In another generation, without rank 1's samples in a step beside which it copies the state."""
    for rank, communicator in zip(members, in_process_world(2), strict=True):
        copies = bool(rank.engine.healing) and communicator.global_rank == 1
        rank.bring(communicator, (0, 0) if copies else None)
        rank.model.communicator_changed()
    run_ranks(members, lambda r: r.step())
    assert_equal_bits([m.parameters() for m in members])
    return members[0].parameters()


def test_a_member_that_copies_the_state_behind_a_step_it_lost_begins_without_errors() -> None:
    """Its own message, with its error, is in the sum that the other has committed."""

    def history() -> list[Rank]:
        members = with_errors()
        behind = members[1].engine
        done = behind.reduction_done

        def lost(pair: tuple[float, float] | None) -> None:
            behind.failed = CollectiveFailed("rank 0 was not heard any more")

        behind.reduction_done = lost  # type: ignore[method-assign]
        assert run_ranks(members, lambda r: r.step()) == [True, False]
        behind.reduction_done = done  # type: ignore[method-assign]
        members[1].model.step_rolled_back()
        copy_state(members[0], members[1])
        return members

    members, expected = history(), history()
    expected[1] = fresh_like(expected[0])
    assert_equal_bits([next_step(members), next_step(expected)])
    assert_equal_bits([next_step(members), next_step(expected)])  # both keep the errors of the step before


def test_a_member_that_copies_the_state_beside_a_step_sends_no_error_of_earlier() -> None:
    members, expected = with_errors(), with_errors()
    expected[1] = fresh_like(expected[0])
    for rank in (*members, *expected):
        rank.engine.healing = frozenset({1})
    assert_equal_bits([next_step(members), next_step(expected)])


def test_errors_of_a_step_that_was_reduced_and_then_failed_are_dropped() -> None:
    """Another model's part of the step may fail behind it."""
    members = with_errors()
    run_ranks(members, lambda r: r.backward())
    for member in members:
        member.model.step_rolled_back()
    expected = [fresh_like(m) for m in members]
    assert_equal_bits([next_step(members), next_step(expected)])


def test_errors_outlive_a_planned_generation_and_steps_without_the_model() -> None:
    def history(rests: bool) -> list[torch.Tensor]:
        members = with_errors()
        for rank in members if rests else ():
            rank.model.step_committed()
            rank.engine.step += 1
        return next_step(members)

    without = with_errors()
    fresh = next_step([fresh_like(m) for m in without])
    assert_equal_bits([history(rests=True), history(rests=False)])
    assert not torch.equal(history(rests=True)[0], fresh[0])


def test_a_member_that_trained_alone_has_no_error_of_before() -> None:
    """It sends nothing while it is alone, and the error of the last step that it sent is not of the next one's."""

    def history(fresh: bool) -> list[torch.Tensor]:
        members = with_errors()
        members[0].move_to(None)
        for _ in range(3):
            assert members[0].step()
        joiner = fresh_like(members[0])
        return next_step([fresh_like(members[0]) if fresh else members[0], joiner])

    assert_equal_bits([history(fresh=False), history(fresh=True)])


def test_errors_are_added_where_a_step_is_reduced_without_compression() -> None:
    """All members are on one node then. The step behind it begins without errors."""

    def history(fresh: bool) -> list[torch.Tensor]:
        members = with_errors()
        if fresh:
            members = [fresh_like(m) for m in members]
        for rank, communicator in zip(members, world_on_nodes((2,)), strict=True):
            rank.bring(communicator, None)
            rank.model.communicator_changed()
        run_ranks(members, lambda r: r.step())
        assert_equal_bits([m.parameters() for m in members])
        reduced = members[0].gradients()
        expected = [fresh_like(m) for m in members]
        assert_equal_bits([next_step(members), next_step(expected)])
        return reduced

    with_error, without = history(fresh=False), history(fresh=True)
    assert not all(torch.equal(a, b) for a, b in zip(with_error, without, strict=True))


def test_the_built_in_formats_by_name() -> None:
    ours, theirs = (gradients_of(a) for a in (CompressedAllreduce("minmax_uint8", False), ByteGrad()))
    assert_equal_bits([ours[0], theirs[0]])
    gradients_of(CompressedAllreduce("one_bit"), size=3)


def test_values_that_can_not_be_represented_are_noticed() -> None:
    values = torch.tensor([[1.0, torch.nan], [1.0, 2.0]])
    out = torch.zeros(2, Signs().size_bytes(2), dtype=torch.uint8)
    Signs().compress(values, out)
    for feedback in (False, True):
        compression = compressors.make(Signs(), feedback)
        assert bool(compression.nan_flag(out, 2)) and not bool(compression.nan_flag(out[1:], 2))


def test_names_that_are_none_and_names_that_are_taken() -> None:
    with pytest.raises(
        UnknownCompressorError, match=r"'zip' with feedback=True is unknown; use one of .*one_bit"
    ):
        CompressedAllreduce("zip")
    with pytest.raises(UnknownCompressorError, match="'one_bit' with feedback=False"):
        CompressedAllreduce("one_bit", feedback=False)
    with pytest.raises(ValueError, match="there is a compressor 'one_bit' already"):
        compressors.register("one_bit", Signs)
    assert "signs" in CompressedAllreduce(Signs()).described
