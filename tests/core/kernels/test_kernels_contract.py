"""Every implementation gives the bits of the slow reference."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import bagua_core.kernels as kernels
from tests.core.defaults import default_dtype
from tests.core.kernels import reference
from tests.core.kernels.reference import bits_of, values_of
from tests.core.kernels.samples import COUNTS, DTYPES, hard_blocks, normal, unaligned

pytestmark = pytest.mark.usefixtures("implementation")

BLOCKS = (64, 1024)
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))


def data_of(compressed: Tensor) -> bytes:
    return compressed.numpy().tobytes()


def assert_same(found: Tensor, expected: Tensor) -> None:
    assert found.dtype == expected.dtype and found.shape == expected.shape
    same = bits_of(found) == bits_of(expected)
    assert same.all(), f"{int((~same).sum())} bytes differ: {found} {expected}"


@each_dtype
@pytest.mark.parametrize("block_size", BLOCKS)
def test_minmax_at_every_count(dtype: torch.dtype, block_size: int) -> None:
    for count in COUNTS:
        values = normal(count, dtype, seed=count)
        compressed = kernels.minmax_compress(values, block_size=block_size)
        expected = reference.minmax_compressed(values_of(values), block_size)
        assert data_of(compressed) == expected, count
        found = kernels.minmax_decompress(compressed, torch.empty_like(values), block_size=block_size)
        assert_same(found, reference.stored(reference.minmax_decoded(expected, count, block_size), dtype))


@each_dtype
@pytest.mark.parametrize("block_size", BLOCKS)
def test_one_bit_at_every_count(dtype: torch.dtype, block_size: int) -> None:
    for count in COUNTS:
        values, error = normal(count, dtype, seed=count), normal(count, torch.float32, seed=count + 1)
        expected, left = reference.one_bit_compressed(values_of(values), values_of(error), block_size)
        compressed = kernels.one_bit_compress(values, error, block_size=block_size)
        assert data_of(compressed) == expected, count
        assert_same(error, reference.stored(left, torch.float32))
        found = kernels.one_bit_decompress(compressed, torch.empty_like(values), block_size=block_size)
        assert_same(found, reference.stored(reference.one_bit_decoded(expected, count, block_size), dtype))


@each_dtype
def test_hard_blocks(dtype: torch.dtype) -> None:
    for name, values in hard_blocks(dtype).items():
        expected = reference.minmax_compressed(values_of(values), 64)
        compressed = kernels.minmax_compress(values, block_size=64)
        assert data_of(compressed) == expected, name
        found = kernels.minmax_decompress(compressed, torch.empty_like(values), block_size=64)
        assert_same(found, reference.stored(reference.minmax_decoded(expected, 64, 64), dtype))

        error = torch.linspace(-1, 1, 64)
        expected, left = reference.one_bit_compressed(values_of(values), values_of(error), 64)
        compressed = kernels.one_bit_compress(values, error, block_size=64)
        assert data_of(compressed) == expected, name
        assert_same(error, reference.stored(left, torch.float32))
        found = kernels.one_bit_decompress(compressed, torch.empty_like(values), block_size=64)
        assert_same(found, reference.stored(reference.one_bit_decoded(expected, 64, 64), dtype))


@each_dtype
def test_the_largest_block(dtype: torch.dtype) -> None:
    count, block_size = 8192 + 4099, 8192
    values, error = normal(count, dtype), normal(count, torch.float32, seed=1)
    expected, left = reference.one_bit_compressed(values_of(values), values_of(error), block_size)
    assert data_of(kernels.one_bit_compress(values, error, block_size=block_size)) == expected
    assert_same(error, reference.stored(left, torch.float32))
    compressed = kernels.minmax_compress(values, block_size=block_size)
    assert data_of(compressed) == reference.minmax_compressed(values_of(values), block_size)


@each_dtype
@pytest.mark.parametrize("scale", [1.0, 1 / 3])
def test_reductions_sum_in_the_order_of_the_rows(dtype: torch.dtype, scale: float) -> None:
    count, block_size, peers = 333, 128, 5
    values = torch.stack([normal(count, torch.float32, seed=p) * 10.0**p for p in range(peers)])
    compressed = kernels.minmax_compress(values, block_size=block_size)
    rows = [reference.minmax_decoded(data_of(row), count, block_size) for row in compressed]
    total = reference.summed(rows, scale)
    reduced = kernels.minmax_reduce(compressed, count, scale=scale, block_size=block_size)
    assert data_of(reduced) == reference.minmax_compressed(total, block_size)
    out = torch.empty(count, dtype=dtype)
    kernels.minmax_reduce_values(compressed, out, scale=scale, block_size=block_size)
    assert_same(out, reference.stored(total, dtype))

    bits = kernels.one_bit_compress(values, torch.zeros_like(values), block_size=block_size)
    rows = [reference.one_bit_decoded(data_of(row), count, block_size) for row in bits]
    kernels.one_bit_reduce_values(bits, out, scale=scale, block_size=block_size)
    assert_same(out, reference.stored(reference.summed(rows, scale), dtype))


@each_dtype
@pytest.mark.parametrize("add", [False, True])
def test_decompression_scales_and_adds(dtype: torch.dtype, add: bool) -> None:
    count, block_size, scale = 1100, 64, -0.3
    values, old = normal(count, torch.float32), normal(count, dtype, seed=9)

    def expected(decoded: list[np.float32]) -> Tensor:
        scaled = [np.float32(np.float32(scale) * x) for x in decoded]
        if add:
            scaled = [np.float32(o + s) for o, s in zip(values_of(old), scaled, strict=True)]
        return reference.stored(scaled, dtype)

    compressed = kernels.minmax_compress(values, block_size=block_size)
    found = kernels.minmax_decompress(compressed, old.clone(), scale=scale, add=add, block_size=block_size)
    assert_same(found, expected(reference.minmax_decoded(data_of(compressed), count, block_size)))
    bits = kernels.one_bit_compress(values, torch.zeros_like(values), block_size=block_size)
    found = kernels.one_bit_decompress(bits, old.clone(), scale=scale, add=add, block_size=block_size)
    assert_same(found, expected(reference.one_bit_decoded(data_of(bits), count, block_size)))


@each_dtype
def test_rows_are_compressed_by_themselves_wherever_they_lie(dtype: torch.dtype) -> None:
    values = unaligned(normal(3 * 201, dtype)).view(3, 201)
    error = unaligned(normal(3 * 201, torch.float32, seed=1)).view(3, 201)
    singly = [kernels.minmax_compress(row.clone(), block_size=64) for row in values]
    compressed = kernels.minmax_compress(values, block_size=64)
    assert_same(compressed, torch.stack(singly))
    found = kernels.minmax_decompress(compressed, unaligned(values.flatten()).view(3, 201), block_size=64)
    each = [kernels.minmax_decompress(row, torch.empty(201, dtype=dtype), block_size=64) for row in singly]
    assert_same(found, torch.stack(each))

    errors = [row.clone() for row in error]
    singly = [
        kernels.one_bit_compress(v.clone(), e, block_size=64) for v, e in zip(values, errors, strict=True)
    ]
    assert_same(kernels.one_bit_compress(values, error, block_size=64), torch.stack(singly))
    assert_same(error, torch.stack(errors))


@pytest.mark.parametrize("y_dtype", DTYPES)
@each_dtype
def test_averages(dtype: torch.dtype, y_dtype: torch.dtype) -> None:
    count = 1301
    x, y, z = (unaligned(normal(count, d, seed=s)) for s, d in enumerate((dtype, y_dtype, y_dtype)))
    x[:4], y[:4] = torch.tensor([torch.inf, torch.nan, -0.0, 0.0]), torch.tensor([-torch.inf, 1.0, -0.0, 0.0])
    a, b = np.float32(0.3), np.float32(0.7)
    with np.errstate(invalid="ignore"):
        weighted = [
            np.float32(np.float32(a * u) + np.float32(b * v))
            for u, v in zip(values_of(x), values_of(y), strict=True)
        ]
        moved = [
            np.float32(u + np.float32(a * np.float32(v - w)))
            for u, v, w in zip(values_of(x), values_of(y), values_of(z), strict=True)
        ]
    other = x.clone()
    assert_same(kernels.weighted_average(x, y, 0.3, 0.7), reference.stored(weighted, dtype))
    assert_same(kernels.add_difference(other, y, z, 0.3), reference.stored(moved, dtype))


@pytest.mark.parametrize("flat_dtype", DTYPES)
@each_dtype
def test_flat_buffers_cast_on_the_way(dtype: torch.dtype, flat_dtype: torch.dtype) -> None:
    shapes = [(3,), (0,), (5, 7), (), (8500,), (1,), (2, 0), (64, 3)]
    tensors = [normal(int(np.prod(shape)), dtype, seed=i).reshape(shape) for i, shape in enumerate(shapes)]
    tensors[2][0, :3] = torch.tensor([torch.nan, torch.inf, 65519.0])
    flat = kernels.flatten(tensors, dtype=flat_dtype)
    whole = torch.cat([t.flatten() for t in tensors])
    assert_same(flat, whole if dtype == flat_dtype else reference.stored(values_of(whole), flat_dtype))

    returned = [torch.empty_like(t) for t in tensors]
    kernels.unflatten(flat, returned)
    expected = flat if dtype == flat_dtype else reference.stored(values_of(flat), dtype)
    assert_same(torch.cat([t.flatten() for t in returned]), expected)


@pytest.mark.parametrize(
    "dtype",
    [torch.uint8, torch.int16, torch.int64, torch.float64, torch.complex64, torch.complex128, torch.bool],
)
def test_flat_buffers_of_other_dtypes(dtype: torch.dtype) -> None:
    tensors = [(normal(n, torch.float32, seed=n) * 100).to(dtype) for n in (5, 17, 1)]
    flat = kernels.flatten(tensors)
    assert_same(flat, torch.cat(tensors))
    returned = [torch.zeros_like(t) for t in tensors]
    kernels.unflatten(flat, returned)
    assert all(torch.equal(a, b) for a, b in zip(returned, tensors, strict=True))


def test_narrow_floats_one_by_one() -> None:
    """All 65,536 of both narrow dtypes, and back."""
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    for dtype in (torch.float16, torch.bfloat16):
        narrow = bits.view(dtype)
        wide = kernels.flatten([narrow], dtype=torch.float32)
        assert_same(wide, reference.stored(values_of(narrow), torch.float32))
        assert_same(kernels.flatten([wide], dtype=dtype), reference.stored(values_of(narrow), dtype))


def test_floats_between_narrow_ones() -> None:
    """Halfway, just below and just above halfway between neighbours, where rounding is decided."""
    for dtype, shift in ((torch.float16, 13), (torch.bfloat16, 16)):
        powers = torch.arange(0, 256, dtype=torch.int64)[:, None] << 23
        near_powers = (powers + torch.tensor([-2, -1, 0, 1]) * 2**shift).flatten().clamp(min=0)
        anywhere = (
            torch.randint(0, 2**31, (3000,), generator=torch.Generator().manual_seed(0)) >> shift << shift
        )
        highs = torch.cat([near_powers, anywhere])
        offsets = torch.tensor([-1, 0, 1, 2 ** (shift - 1) - 1, 2 ** (shift - 1), 2 ** (shift - 1) + 1])
        bits = (highs[:, None] + offsets).flatten().clamp(0, 2**31 - 1).to(torch.int32)
        wide = torch.cat([bits.view(torch.float32), -bits.view(torch.float32)])
        assert_same(kernels.flatten([wide], dtype=dtype), reference.stored(values_of(wide), dtype))


def seconds_for(count: int, dtype: torch.dtype) -> Tensor:
    """Of every size that second moments have, none and infinity (what rests) among them."""
    found = normal(count, torch.float32, seed=5).square() * torch.logspace(-6, 2, count)
    found[::7] = 0.0
    found[3::11] = torch.inf
    return found.to(dtype)


@each_dtype
def test_steps_of_adam_and_back(dtype: torch.dtype) -> None:
    for count in (*COUNTS, 4096, 9001):
        for place, values in (("aligned", normal(count, dtype)), ("not", unaligned(normal(count, dtype)))):
            values[count // 2] *= 1000
            second, before = seconds_for(count, dtype), normal(count, torch.float32, seed=9)
            after = torch.empty_like(before)
            steps = reference.adam_steps(values_of(values), values_of(second), 1e-3, 8.0)
            whole = reference.adam_steps(values_of(values), values_of(second), 1e-3, np.inf)
            assert_same(
                kernels.adam_steps(values.clone(), second, 1e-3, np.inf), reference.stored(whole, dtype)
            )
            found = kernels.adam_steps(values.clone(), second, 1e-3, 8.0)
            assert_same(found, reference.stored(steps, dtype))
            smooth = [
                np.float32(np.float32(np.float32(0.9) * b) + x)
                for b, x in zip(values_of(before), steps, strict=True)
            ]
            kernels.adam_steps(values, second, 1e-3, 8.0, before=before, after=after, decay=0.9)
            assert_same(values, reference.stored(smooth, dtype))
            assert_same(after, reference.stored(smooth, torch.float32))
            expected = reference.adam_gradients(values_of(values), values_of(second), 1e-3)
            (
                assert_same(kernels.adam_gradients(values, second, 1e-3), reference.stored(expected, dtype)),
                place,
            )


@each_dtype
def test_adams_update(dtype: torch.dtype) -> None:
    settings = {"share": 0.1, "weight_decay": 0.01, "eps": 1e-6, "rate": 0.02}
    for count in (*COUNTS, 9001):
        parameter, gradient, first = (normal(count, dtype, seed=seed) for seed in range(3))
        second = seconds_for(count, dtype)
        columns = zip(*(values_of(t) for t in (parameter, gradient, first, second)), strict=True)
        expected = [reference.adam_updated(*column, **settings) for column in columns]
        assert kernels.adam_update(parameter, gradient, first, second, **settings) is parameter
        for found, wanted in zip((first, parameter), zip(*expected, strict=True), strict=True):
            assert_same(found, reference.stored(wanted, dtype))


def test_what_is_not_finite_is_seen_and_not_remembered() -> None:
    values = normal(5000, torch.float32)
    values[10], values[20] = torch.nan, torch.inf
    before, after = torch.ones(5000), torch.empty(5000)
    kernels.adam_steps(values, torch.ones(5000), 1e-8, 32.0, before=before, after=after, decay=0.9)
    assert values[10].isnan() and values[20].isinf() and int(values.isfinite().sum()) == 4998
    assert after[10] == after[20] == 0.0 and bool(after.isfinite().all())


def test_the_new_error_may_go_elsewhere() -> None:
    values, error = normal(9000, torch.float32), normal(9000, torch.float32, seed=1)
    kept, left = error.clone(), torch.empty_like(error)
    there = kernels.one_bit_compress(values, error, left=left)
    assert_same(error, kept)
    in_place = kernels.one_bit_compress(values, error)
    assert_same(there, in_place)
    assert_same(left, error)


def test_the_scripts_default_dtype_changes_nothing() -> None:
    count = 301  # bfloat16 has no such number
    values, error = normal(count, torch.float32), normal(count, torch.float32, seed=1)
    second = seconds_for(count, torch.float32)
    expected, left = reference.one_bit_compressed(values_of(values), values_of(error), 1024)
    steps = reference.adam_steps(values_of(values), values_of(second), 1e-3, 1.0)
    with default_dtype(torch.bfloat16):
        assert data_of(kernels.one_bit_compress(values, error, block_size=1024)) == expected
        kernels.adam_steps(values, second, 1e-3, 1.0)
    assert_same(error, reference.stored(left, torch.float32))
    assert_same(values, reference.stored(steps, torch.float32))


any_float = st.integers(0, 2**32 - 1).map(lambda bits: np.uint32(bits).view(np.float32))
likely_float = st.floats(width=32, allow_nan=False, allow_infinity=False, min_value=-1e3, max_value=1e3)


@settings(max_examples=60)
@given(
    values=st.one_of(
        st.lists(likely_float, min_size=1, max_size=150), st.lists(any_float, min_size=1, max_size=150)
    ),
    block_size=st.sampled_from((64, 128)),
    dtype=st.sampled_from(DTYPES),
)
def test_any_floats(values: list[float], block_size: int, dtype: torch.dtype) -> None:
    x = torch.from_numpy(np.array(values, np.float32)).to(dtype)
    compressed = kernels.minmax_compress(x, block_size=block_size)
    assert data_of(compressed) == reference.minmax_compressed(values_of(x), block_size)
    error = torch.from_numpy(np.array(values[::-1], np.float32))
    with np.errstate(all="ignore"):
        expected, left = reference.one_bit_compressed(values_of(x), values_of(error), block_size)
    assert data_of(kernels.one_bit_compress(x, error, block_size=block_size)) == expected
    assert_same(error, reference.stored(left, torch.float32))
