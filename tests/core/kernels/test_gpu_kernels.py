"""CUDA and the CPU give the same bits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import bagua_core.kernels as kernels
from bagua_core.kernels import targets
from bagua_core.kernels.fallback import FallbackKernels
from tests.core.kernels.reference import bits_of
from tests.core.kernels.samples import COUNTS, DTYPES, hard_blocks, normal

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True, params=["cuda", "fallback"])
def gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    if request.param == "fallback":
        served = (targets.Target("fallback", "chosen by a test"), FallbackKernels())
        monkeypatch.setattr(targets, "_cuda", lambda choice: served)
    else:
        pytest.importorskip("cupy")
    assert kernels.target("cuda").name == request.param


def assert_same(on_gpu: Tensor, on_cpu: Tensor) -> None:
    assert on_gpu.is_cuda and not on_cpu.is_cuda
    assert torch.equal(bits_of(on_gpu.cpu()), bits_of(on_cpu))


def compare(values: Tensor, block_size: int) -> None:
    """values: [rows, count] on the CPU."""
    count = values.shape[1]
    on_gpu = values.cuda()
    bytes_cpu, bytes_gpu = (kernels.minmax_compress(v, block_size=block_size) for v in (values, on_gpu))
    assert_same(bytes_gpu, bytes_cpu)
    errors = torch.randn(values.shape, generator=torch.Generator().manual_seed(3))
    errors_gpu = errors.cuda()
    bits_cpu = kernels.one_bit_compress(values, errors, block_size=block_size)
    bits_gpu = kernels.one_bit_compress(on_gpu, errors_gpu, block_size=block_size)
    assert_same(bits_gpu, bits_cpu)
    assert_same(errors_gpu, errors)
    for dtype in DTYPES:
        for add in (False, True):
            for decompress, ours, theirs in (
                (kernels.minmax_decompress, bytes_cpu, bytes_gpu),
                (kernels.one_bit_decompress, bits_cpu, bits_gpu),
            ):
                old = torch.linspace(-1, 1, values.numel()).view(values.shape).to(dtype)
                found = decompress(theirs, old.cuda(), scale=0.3, add=add, block_size=block_size)
                assert_same(found, decompress(ours, old.clone(), scale=0.3, add=add, block_size=block_size))
        for reduce, ours, theirs in (
            (kernels.minmax_reduce_values, bytes_cpu, bytes_gpu),
            (kernels.one_bit_reduce_values, bits_cpu, bits_gpu),
        ):
            out = torch.empty(count, dtype=dtype)
            found = reduce(theirs, out.cuda(), scale=1 / 3, block_size=block_size)
            assert_same(found, reduce(ours, out, scale=1 / 3, block_size=block_size))
    assert_same(
        kernels.minmax_reduce(bytes_gpu, count, scale=1 / 3, block_size=block_size),
        kernels.minmax_reduce(bytes_cpu, count, scale=1 / 3, block_size=block_size),
    )


@pytest.mark.parametrize("block_size", [64, 1024, 2048, 4096, 8192])
@pytest.mark.parametrize("dtype", DTYPES)
def test_compression(dtype: torch.dtype, block_size: int) -> None:
    for count in (*COUNTS, 8192, 100_003):
        compare(torch.stack([normal(count, dtype, seed=s) for s in range(3)]), block_size)


@pytest.mark.parametrize("dtype", DTYPES)
def test_hard_values(dtype: torch.dtype) -> None:
    for values in hard_blocks(dtype).values():
        compare(values.view(1, -1), 64)


@pytest.mark.parametrize("dtype", DTYPES)
def test_any_bits(dtype: torch.dtype) -> None:
    whole = torch.int32 if dtype == torch.float32 else torch.int16
    info = torch.iinfo(whole)
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(info.min, info.max, (2, 50_000), generator=generator, dtype=torch.int64).to(whole)
    compare(bits.view(dtype), 64)


@pytest.mark.parametrize("other", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_averages_and_flat_buffers(dtype: torch.dtype, other: torch.dtype) -> None:
    count = 70_001
    x, y, z = normal(count, dtype), normal(count, other, seed=1), normal(count, other, seed=2)
    found = kernels.weighted_average(x.cuda(), y.cuda(), 0.3, 0.7)
    assert_same(found, kernels.weighted_average(x.clone(), y, 0.3, 0.7))
    found = kernels.add_difference(x.cuda(), y.cuda(), z.cuda(), 0.3)
    assert_same(found, kernels.add_difference(x.clone(), y, z, 0.3))

    parts = [x[:1], x[1:1], x[1:4000], x[4000:]]
    on_gpu = [p.cuda() for p in parts]
    flat, flat_gpu = kernels.flatten(parts, dtype=other), kernels.flatten(on_gpu, dtype=other)
    assert_same(flat_gpu, flat)
    kernels.unflatten(flat_gpu * 2, on_gpu)
    expected = [torch.empty_like(p) for p in parts]
    kernels.unflatten(flat * 2, expected)
    for part, same in zip(on_gpu, expected, strict=True):
        assert_same(part, same)


@pytest.mark.parametrize("dtype", DTYPES)
def test_adam(dtype: torch.dtype) -> None:
    count = 70_001
    parameter, gradient, first = (normal(count, dtype, seed=seed) for seed in range(3))
    second, before = normal(count, dtype, seed=3).square(), normal(count, torch.float32, seed=4)
    second[::9] = torch.inf
    results = []
    for move in (torch.Tensor.clone, torch.Tensor.cuda):
        p, g, m, v, b = (move(t) for t in (parameter, gradient, first, second, before))
        after = torch.empty_like(b)
        steps = kernels.adam_steps(g.clone(), v, 1e-3, 3.0, before=b, after=after, decay=0.9)
        back = kernels.adam_gradients(steps.clone(), v, 1e-3)
        kernels.adam_update(p, g, m, v, share=0.1, weight_decay=0.1, eps=1e-3, rate=0.01)
        results.append((steps, after, back, m, p))
    for on_cpu, on_gpu in zip(*results, strict=True):
        assert_same(on_gpu, on_cpu)


def test_kernels_run_on_the_current_stream() -> None:
    values = normal(10_000_000, torch.float32)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        on_gpu = values.cuda(non_blocking=True)
        for _ in range(20):
            on_gpu = on_gpu * 1.0
        compressed = kernels.minmax_compress(on_gpu)
        compressed.record_stream(stream)
    stream.synchronize()
    assert_same(compressed, kernels.minmax_compress(values))
