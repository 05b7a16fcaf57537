"""Sums of compressed chunks lose nothing in the long run, under any assignment of the chunks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from bagua_core.communication.compressed.chunks import Chunks
from bagua_core.communication.compressed.compression import (
    Compression,
    MinMax,
    MinMaxWithFeedback,
    OneBit,
    WithFeedback,
)
from bagua_core.communication.compressed.scratch import ALIGNMENT, Scratch

ELEMENTS = 20011  # divisible by no number of workers
CPU = torch.device("cpu")
RANDOM = torch.Generator().manual_seed(7)


def exchange(ranks: list[Compression], contributions: torch.Tensor, number: int = 0) -> torch.Tensor:
    """What all ranks get. contributions: [ranks, elements]."""
    chunks = Chunks(contributions.shape[1], len(ranks))
    size_bytes = ranks[0].size_bytes(chunks.size)
    coders = [r.coder(r.step, number, chunks, owner, CPU) for owner, r in enumerate(ranks)]
    sent = torch.empty(len(ranks), len(ranks), size_bytes, dtype=torch.uint8)
    for coder, values, out in zip(coders, contributions, sent, strict=True):
        filled = torch.empty(chunks.filled * chunks.size)
        chunks.fill_up(values, filled)
        for owners, rows in chunks.runs(values, filled):
            coder.compress(owners, rows, out[owners])
    sums = torch.empty(len(ranks), size_bytes, dtype=torch.uint8)
    for owner, coder in enumerate(coders):
        coder.reduce(sent[:, owner].contiguous(), sums[owner])
    rows = torch.empty(len(ranks), chunks.size)
    ranks[0].decompress(sums, rows)
    return rows.view(-1)[: contributions.shape[1]].clone()


def held(ranks: list[Compression], elements: int = ELEMENTS) -> torch.Tensor:
    """What the ranks have not sent, all together."""
    total = torch.zeros(elements)
    for r in ranks:
        assert isinstance(r, WithFeedback)
        for errors in r._kept.values():
            total += errors.in_place(elements)
    return total


def one_bits(count: int) -> list[Compression]:
    return [OneBit() for _ in range(count)]


@pytest.mark.parametrize("form", [OneBit, MinMaxWithFeedback])
def test_feedback_loses_nothing_over_steps_and_generations(form: type[WithFeedback]) -> None:
    ranks: list[Compression] = [form() for _ in range(3)]
    asked, got = torch.zeros(ELEMENTS), torch.zeros(ELEMENTS)
    for step, size in enumerate([3, 3, 3, 5, 5, 4, 4, 1, 3]):
        # a lost worker's errors are lost with it, so what it held is not expected any more
        asked -= held(ranks[size:])
        ranks = ranks[:size] + [form() for _ in range(size - len(ranks))]
        contributions = torch.randn(size, ELEMENTS, generator=RANDOM)
        asked += contributions.sum(0)
        got += exchange(ranks, contributions)
        for r in ranks:
            r.reduced()
        torch.testing.assert_close(got + held(ranks), asked, rtol=1e-4, atol=1e-3, msg=f"step {step}")


def test_errors_even_out_over_steps() -> None:
    ranks = one_bits(4)
    fixed = torch.randn(4, ELEMENTS, generator=RANDOM)
    total = torch.zeros(ELEMENTS)
    off: dict[int, float] = {}
    for step in range(1, 101):
        total += exchange(ranks, fixed)
        for r in ranks:
            r.reduced()
        off[step] = float((total / step - fixed.sum(0)).abs().mean())
    assert off[100] < off[10] / 4 < off[1] / 8


def test_a_step_that_failed_leaves_no_error() -> None:
    ranks, steady = one_bits(2), one_bits(2)
    contributions = torch.randn(4, 2, ELEMENTS, generator=RANDOM)
    for several in (ranks, steady):
        exchange(several, contributions[0])
        for r in several:
            r.reduced()
    exchange(ranks, contributions[1])
    late = [r.step for r in ranks]
    for r in ranks:
        r.failed()
    for r, step in zip(ranks, late, strict=True):  # a job of the failed step that goes on for a while
        r.coder(step, 0, Chunks(ELEMENTS, 2), 0, CPU)
        r.unsent(step, 0, ELEMENTS)
    for several in (ranks, steady):
        several_results = [exchange(several, contributions[2])]
        for r in several:
            r.reduced()
        several_results.append(exchange(several, contributions[3]))
        if several is ranks:
            first = several_results
    assert all(torch.equal(a, b) for a, b in zip(first, several_results, strict=True))


@pytest.mark.parametrize("sizes", [(1, 3), (3, 3), (3, 4), (2, 3)], ids=str)
@pytest.mark.parametrize("form", [OneBit, MinMaxWithFeedback])
def test_elements_whose_sum_is_discarded_keep_their_errors(
    form: type[WithFeedback], sizes: tuple[int, int]
) -> None:
    """In chunks of several owners, which change hands. sizes: ranks with a step before, and ranks of the step."""
    begun, now = sizes
    ranks: list[Compression] = [form() for _ in range(begun)]
    exchange(ranks, torch.randn(begun, ELEMENTS, generator=RANDOM))
    for r in ranks:
        r.reduced()
    ranks += [form() for _ in range(now - begun)]
    before, discarded = held(ranks), slice(5_003, 15_001)
    contributions = torch.randn(now, ELEMENTS, generator=RANDOM)
    contributions[:, discarded] = 0.0
    got = exchange(ranks, contributions)
    got[discarded] = 0.0
    for r in ranks:
        assert isinstance(r, WithFeedback)
        r.discard(0, [discarded])
        r.reduced()
    after = held(ranks)
    assert before[discarded].any()
    torch.testing.assert_close(after[discarded], before[discarded], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(got + after, contributions.sum(0) + before, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("form", [OneBit, MinMaxWithFeedback])
def test_elements_whose_sum_is_discarded_keep_errors_that_travelled_uncompressed(
    form: type[WithFeedback],
) -> None:
    """All together they are discarded in two parts, as those of two parameters."""
    ranks: list[Compression] = [form() for _ in range(3)]
    exchange(ranks, torch.randn(3, ELEMENTS, generator=RANDOM))
    for r in ranks:
        r.reduced()
    before, parts = held(ranks), (slice(5_003, 9_000), slice(9_000, 15_001))
    for r in ranks:
        assert isinstance(r, WithFeedback)
        r.unsent(r.step, 0, ELEMENTS)
        r.discard(0, parts)
        r.reduced()
    expected = torch.zeros(ELEMENTS)
    for part in parts:
        expected[part] = before[part]
    assert expected.any()
    torch.testing.assert_close(held(ranks), expected, rtol=1e-6, atol=1e-6)


class Clones(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.count += func is torch.ops.aten.clone.default
        return func(*args, **(kwargs or {}))


def test_a_bucket_is_copied_once_for_all_its_discarded_elements() -> None:
    """A large model may leave out thousands of parameters of one bucket."""
    one = OneBit()
    exchange([one], torch.randn(1, ELEMENTS, generator=RANDOM))
    one.reduced()
    exchange([one, OneBit()], torch.randn(2, ELEMENTS, generator=RANDOM))  # other chunks
    with Clones() as clones:
        one.discard(0, [slice(begin, begin + 10) for begin in range(0, 1000, 10)])
    assert clones.count == 1


def test_errors_that_are_handed_over_are_not_kept() -> None:
    ranks = one_bits(2)
    exchange(ranks, torch.randn(2, ELEMENTS, generator=RANDOM))
    for r in ranks:
        r.reduced()
    before = held(ranks[:1])
    one = ranks[0]
    handed = one.unsent(one.step, 0, ELEMENTS)
    assert handed is not None and torch.equal(handed, before) and before.any()
    one.failed()
    assert torch.equal(held(ranks[:1]), before), "the step did not happen"
    one.unsent(one.step, 0, ELEMENTS)
    one.reduced()
    assert not held(ranks[:1]).any()
    assert one.unsent(one.step, 0, ELEMENTS) is None
    assert MinMax().unsent(one.step, 0, ELEMENTS) is None


def test_buckets_have_errors_of_their_own() -> None:
    ranks = one_bits(2)
    for number, elements in enumerate([3000, 5001]):
        exchange(ranks, torch.randn(2, elements, generator=RANDOM), number)
    for r in ranks:
        r.reduced()
    assert isinstance(ranks[0], OneBit)
    assert {n: e.chunks.elements for n, e in ranks[0]._kept.items()} == {0: 3000, 1: 5001}


@pytest.mark.parametrize("count", [1, 2, 5])
def test_eight_bits_lose_little(count: int) -> None:
    contributions = torch.randn(count, ELEMENTS, generator=RANDOM)
    found = exchange([MinMax() for _ in range(count)], contributions)
    total = contributions.sum(0)
    spans = [float(c.max() - c.min()) for c in (*contributions, total)]
    assert float((found - total).abs().max()) <= sum(spans) * 1.05 / 510


def test_memory_is_used_again_unless_it_was_given_up() -> None:
    scratch = Scratch()
    first = scratch.take([100, 0, 64], CPU)
    assert [p.numel() for p in first.parts] == [100, 0, 64]
    assert all(p.data_ptr() % ALIGNMENT == 0 for p in first.parts if p.numel())
    second = scratch.take([10], CPU)
    assert second.memory.data_ptr() != first.memory.data_ptr()
    scratch.give_back(first)
    assert scratch.take([150], CPU).memory is first.memory
    scratch.give_back(second)
    assert scratch.take([1000], CPU).memory is not second.memory
    assert scratch.take([10], CPU).memory is not second.memory, "the larger one stands for it"


@pytest.mark.parametrize("form", [OneBit, MinMaxWithFeedback])
def test_feedback_is_finite_after_a_block_that_could_not_be_represented(form: type[WithFeedback]) -> None:
    ranks: list[Compression] = [form() for _ in range(2)]
    contributions = torch.randn(2, ELEMENTS, generator=RANDOM)
    contributions[1, 5] = torch.inf
    assert exchange(ranks, contributions)[:64].isnan().all()
    for r in ranks:
        r.reduced()
    assert held(ranks).isfinite().all()
    assert exchange(ranks, torch.ones(2, ELEMENTS)).isfinite().all()
