"""Four bits a value: half a step of error at most, zero stays zero, and what can't be represented is seen."""

from __future__ import annotations

import pytest
import torch

from bagua_core.communication.compressed.compressor import make
from bagua_core.communication.compressed.minmax_int4 import BLOCK, MinMaxInt4

FORM = MinMaxInt4()


def through(values: torch.Tensor) -> torch.Tensor:
    out = torch.full((len(values), FORM.size_bytes(values.shape[1])), 255, dtype=torch.uint8)
    FORM.compress(values, out)
    return FORM.decompress(out, values.shape[1])


def draw(rows: int, count: int) -> torch.Tensor:
    return torch.randn(rows, count, generator=torch.Generator().manual_seed(count))


@pytest.mark.parametrize("count", [1, 2, 7, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 5])
def test_the_error_is_at_most_half_a_step_of_its_block(count: int) -> None:
    values = draw(3, count)
    found = through(values)
    for begin in range(0, count, BLOCK):
        block, got = (t[:, begin : begin + BLOCK] for t in (values, found))
        step = (block.amax(1) - block.amin(1)) / 15
        assert ((got - block).abs().amax(1) <= step * 0.5001).all()
        assert all(len(row.unique()) <= 16 for row in got)


def test_a_value_takes_four_bits_and_its_part_of_a_block_s_two_numbers() -> None:
    assert FORM.size_bytes(2**20) == 2**20 // 2 + 8 * (2**20 // BLOCK)
    assert FORM.size_bytes(2**20) * 8 / 2**20 == 4.25


def test_zero_stays_zero_and_a_constant_stays_itself() -> None:
    values = draw(1, 500)
    values[:, ::3] = 0.0
    assert (through(values)[:, ::3] == 0.0).all()
    torch.testing.assert_close(through(torch.full((1, 9), 0.3)), torch.full((1, 9), 0.3))
    assert (through(torch.zeros(2, 9)) == 0.0).all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), 2.0**127])
def test_a_block_that_cannot_be_represented_is_nan(bad: float) -> None:
    values = draw(1, 2 * BLOCK)
    values[0, 3] = bad
    found = through(values)
    assert found[0, :BLOCK].isnan().all() and found[0, BLOCK:].isfinite().all()


def test_half_precision_and_rows_by_themselves() -> None:
    values = draw(2, 100).to(torch.bfloat16)
    assert torch.equal(through(values), torch.cat([through(values[:1]), through(values[1:])]))


def test_with_feedback_nothing_is_lost_over_steps() -> None:
    form, values = make("minmax_int4", True), draw(1, 300)
    error, total = torch.zeros_like(values), torch.zeros_like(values)
    out, row = torch.empty(1, form.size_bytes(300), dtype=torch.uint8), torch.empty_like(values)
    for _ in range(50):
        form.encode(values, error, error, out)  # type: ignore[attr-defined]
        form.decompress(out, row)
        total += row
    torch.testing.assert_close(total + error, 50 * values, rtol=1e-4, atol=1e-4)
    assert (total / 50 - values).abs().max() < 0.01
