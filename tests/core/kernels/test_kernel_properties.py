"""Guarantees of the compressed forms, for any number of bits: error bounds, exact zeros, NaN for NaN, feedback."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

import bagua_core.kernels as kernels
from tests.core.kernels.samples import hard_blocks, normal

pytestmark = pytest.mark.usefixtures("implementation")


def there_and_back(values: Tensor, block_size: int = kernels.MINMAX_BLOCK) -> Tensor:
    compressed = kernels.minmax_compress(values, block_size=block_size)
    return kernels.minmax_decompress(compressed, torch.empty_like(values), block_size=block_size)


def assert_within_half_a_step(values: Tensor, block_size: int) -> None:
    found = there_and_back(values, block_size)
    for x, y in zip(values.double().split(block_size), found.double().split(block_size), strict=True):
        step = max(float(x.max() - x.min()) / 255, 2.0**-126)
        rounding = float(x.abs().max()) * 2.0**-22
        assert float((x - y).abs().max()) <= step * (0.5 + 1e-4) + rounding


@settings(max_examples=50)
@given(
    seed=st.integers(0, 2**32 - 1),
    count=st.integers(1, 400),
    exponent=st.integers(-37, 36),
    offset=st.sampled_from((0.0, 1.0, -1.0, 1000.0)),
)
def test_the_error_is_at_most_half_a_step(seed: int, count: int, exponent: int, offset: float) -> None:
    values = (normal(count, torch.float32, seed) + offset) * 10.0**exponent
    assume(float(values.abs().max()) <= 2.0**126)  # a block with larger ones decodes to NaN
    assert_within_half_a_step(values, 128)


@pytest.mark.parametrize("magnitude", [1e-4, 1e-9, 1e-20, 1e-30])
def test_tiny_gradients_keep_their_precision(magnitude: float) -> None:
    values = normal(2000, torch.float32)
    found = there_and_back(values * magnitude)
    error = (found / magnitude - values).norm() / values.norm()
    assert error < 0.01


def test_zeros_stay_zero() -> None:
    values = normal(4000, torch.float32)
    values[torch.randperm(4000, generator=torch.Generator().manual_seed(1))[:3000]] = 0.0
    for shifted in (values, values.clamp(min=0.0), values.clamp(max=0.0), values * 1e-20):
        found = there_and_back(shifted)
        assert not found[shifted == 0.0].any()
        assert found.any()


def test_equal_values_come_back_exactly() -> None:
    for value in (0.0, 1.5, -3.7e-20, 2.0**126, -1e-45):
        values = torch.full((100,), value)
        expected = 0.0 if abs(value) < 2.0**-126 else value
        found = there_and_back(values)
        assert torch.all((found == value) | (found == expected)), value


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_what_is_not_finite_comes_back_as_nan(dtype: torch.dtype) -> None:
    for name, values in hard_blocks(dtype).items():
        around = torch.cat([torch.ones(64, dtype=dtype), values, torch.ones(7, dtype=dtype)])
        found = there_and_back(around, 64)
        beyond = not bool((values.float().abs() <= 2.0**126).all())
        assert bool(found[64:128].isnan().all()) == beyond, name
        assert not found[64:128].isnan().any() or beyond, name
        assert torch.equal(found[:64], around[:64]) and torch.equal(found[128:], around[128:])


def test_one_bad_peer_poisons_the_reduction() -> None:
    values = torch.ones(3, 200)
    values[1, 100] = math.inf
    compressed = kernels.minmax_compress(values, block_size=64)
    out = torch.empty(200)
    kernels.minmax_reduce_values(compressed, out, scale=1 / 3, block_size=64)
    assert out.isnan().nonzero().flatten().tolist() == list(range(64, 128))
    reduced = kernels.minmax_reduce(compressed, 200, scale=1 / 3, block_size=64)
    kernels.minmax_decompress(reduced, out, block_size=64)
    assert out.isnan().nonzero().flatten().tolist() == list(range(64, 128))


def test_an_overflowing_sum_is_poisoned() -> None:
    compressed = kernels.minmax_compress(torch.full((8, 64), 2.0**126), block_size=64)
    reduced = kernels.minmax_reduce(compressed, 64, block_size=64)
    assert kernels.minmax_decompress(reduced, torch.empty(64), block_size=64).isnan().all()


def test_one_bit_sends_everything_in_the_end() -> None:
    """The sum of what was sent, and the error that is left, is the sum of what there was to send."""
    values, error, sent = normal(5000, torch.float32), torch.zeros(5000), torch.zeros(5000)
    compressed = None
    for _ in range(50):
        compressed = kernels.one_bit_compress(values, error, compressed)
        kernels.one_bit_decompress(compressed, sent, add=True)
    assert torch.allclose(sent + error, 50 * values, rtol=1e-4, atol=1e-3)
    near = values.abs() < 0.7  # below the mean magnitude, so a step can send them
    assert float((sent / 50 - values)[near].abs().max()) < 0.1


def test_one_bit_survives_a_bad_step() -> None:
    values, error = torch.ones(128), torch.full((128,), 0.25)
    values[5] = math.nan
    error[7] = math.inf
    compressed = kernels.one_bit_compress(values, error, block_size=64)
    found = kernels.one_bit_decompress(compressed, torch.empty(128), block_size=64)
    assert found[:64].isnan().all() and not found[64:].isnan().any()
    expected = torch.full((64,), 0.25)
    expected[7] = 0.0
    assert torch.equal(error[:64], expected)


def test_nothing_is_nothing() -> None:
    for dtype in (torch.float32, torch.float16):
        empty = torch.empty(0, dtype=dtype)
        assert kernels.minmax_compress(empty).shape == (0,)
        assert kernels.one_bit_compress(empty, torch.empty(0)).shape == (0,)
        assert kernels.minmax_decompress(torch.empty(0, dtype=torch.uint8), empty).shape == (0,)
        assert kernels.minmax_compress(torch.empty(3, 0, dtype=dtype)).shape == (3, 0)
        assert kernels.weighted_average(empty, empty, 1.0, 1.0).shape == (0,)
        assert kernels.add_difference(empty, empty, empty).shape == (0,)
        assert kernels.flatten([empty]).shape == (0,)
        assert kernels.minmax_reduce(torch.empty(4, 0, dtype=torch.uint8), 0).shape == (0,)


def test_parameters_that_need_gradients() -> None:
    parameter = torch.nn.Parameter(torch.ones(70))
    kernels.weighted_average(parameter, torch.zeros(70), 0.5, 0.5)
    flat = kernels.flatten([parameter])
    assert torch.equal(flat, torch.full((70,), 0.5)) and not flat.requires_grad
    kernels.unflatten(torch.full((70,), 3.0), [parameter])
    kernels.minmax_decompress(kernels.minmax_compress(parameter), parameter)
    kernels.one_bit_compress(parameter, torch.zeros(70))
    assert torch.equal(parameter.detach(), torch.full((70,), 3.0))
