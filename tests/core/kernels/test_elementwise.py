"""Elementwise programs on the CPU's library: each operation as torch has it, over parts of any size, in any thread."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from bagua_core.kernels import compilation
from bagua_core.kernels.elementwise import Program, Step, use_torchs_sqrt
from bagua_core.kernels.errors import KernelUnavailableError
from bagua_core.kernels.on_cpu import INSTRUCTION_SETS, CpuKernels

NUMBER = 0.7  # of every operation that takes one
Operation = Callable[[Tensor, Tensor, Tensor], Tensor]


def fused(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    """x * y + z, rounded once: a product of two floats has no more digits than a double holds. (Their sum may, in one
    of some hundred millions.)"""
    return (x.double() * y.double() + z.double()).float()


S = torch.tensor(NUMBER)
EXPECTED: dict[str, Operation] = {
    "copy": lambda x, y, z: x,
    "fill": lambda x, y, z: torch.full_like(x, NUMBER),
    "negative": lambda x, y, z: x.neg(),
    "absolute": lambda x, y, z: x.abs(),
    "sqrt": lambda x, y, z: x.double().sqrt().float(),
    "reciprocal": lambda x, y, z: 1 / x,
    "sign": lambda x, y, z: x.sign(),
    "add": lambda x, y, z: x + y,
    "subtract": lambda x, y, z: x - y,
    "multiply": lambda x, y, z: x * y,
    "divide": lambda x, y, z: x / y,
    "maximum": lambda x, y, z: torch.maximum(x, y),
    "minimum": lambda x, y, z: torch.minimum(x, y),
    "add_number": lambda x, y, z: x + NUMBER,
    "subtract_number": lambda x, y, z: x - NUMBER,
    "multiply_number": lambda x, y, z: x * NUMBER,
    "divide_number": lambda x, y, z: x / NUMBER,
    "at_least": lambda x, y, z: x.clamp_min(NUMBER),
    "at_most": lambda x, y, z: x.clamp_max(NUMBER),
    "add_scaled": lambda x, y, z: x + y * S,
    "add_scaled_fused": lambda x, y, z: fused(y, S, x),
    "subtract_scaled": lambda x, y, z: x - y * S,
    "subtract_scaled_fused": lambda x, y, z: fused(y, -S, x),
    "add_product": lambda x, y, z: x + S * y * z,
    "add_product_fused": lambda x, y, z: fused(S * y, z, x),
    "add_quotient": lambda x, y, z: x + S * y / z,
    "interpolate": lambda x, y, z: y - (1 - S) * (y - x),
    "interpolate_fused": lambda x, y, z: fused(S - 1, y - x, y),
    "above": lambda x, y, z: (x > NUMBER).float(),
    "below": lambda x, y, z: (x < NUMBER).float(),
    "equal_to": lambda x, y, z: (x == NUMBER).float(),
    "choose": lambda x, y, z: torch.where(x != 0, y, z),
    "replace_where": lambda x, y, z: torch.where(y != 0, S, x),
}


@pytest.fixture(params=INSTRUCTION_SETS)
def instructions(request: pytest.FixtureRequest, extension: CpuKernels) -> Iterator[str]:
    if extension.use_instruction_set(request.param) != request.param:
        extension.use_instruction_set()
        pytest.skip(f"this processor has no {request.param}")
    yield request.param
    extension.use_instruction_set()


def samples(count: int, seed: int) -> Tensor:
    """Of all magnitudes, with what is special among them."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(count, generator=generator)
    values *= 10.0 ** torch.empty(count).uniform_(-6, 3, generator=generator)
    special = torch.tensor([0.0, -0.0, NUMBER, float("inf"), float("-inf"), float("nan"), 1e-40, 1.0])
    places = torch.randint(count, (count // 8,), generator=generator)
    values[places] = special[torch.randint(len(special), (len(places),), generator=generator)]
    return values


def same_bits(one: Tensor, other: Tensor) -> bool:
    bits = [
        t.nan_to_num(nan=0.0, posinf=float("inf"), neginf=float("-inf")).view(torch.int32)
        for t in (one, other)
    ]
    return torch.equal(one.isnan(), other.isnan()) and torch.equal(*bits)


def test_every_operation_of_the_library_is_tested() -> None:
    header = (compilation.HERE / "elementwise.h").read_text()
    assert re.findall(r"OPERATION\((\w+), ", header) == list(EXPECTED)


@pytest.mark.parametrize("name", EXPECTED)
def test_an_operation_gives_the_bits_of_torch(name: str, instructions: str) -> None:
    parts = []
    for number, count in enumerate((1, 7, 1023, 1024, 1025, 40_000)):
        x, y, z = (samples(count, 10 * number + i) for i in range(3))
        parts.append([x, y, z, torch.full((count,), -1.0)])
    Program([Step(name, 3, 0, 1, 2)], 4, 0).run(parts, [NUMBER])
    for x, y, z, out in parts:
        assert same_bits(out, EXPECTED[name](x, y, z)), f"{name} on {len(x)} elements"


def test_a_program_works_through_temporaries_in_place_and_on_several_threads(instructions: str) -> None:
    """x = (x + 0.5 y)^2, y = -x, with two numbers and two temporaries."""
    steps = [
        Step("add_scaled", 2, 0, 1, number=1),
        Step("copy", 3, 2),
        Step("multiply", 0, 2, 3),
        Step("negative", 1, 0),
    ]
    program = Program(steps, 2, 2)
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        parts = [[torch.randn(n), torch.randn(n)] for n in (300_000, 0, 5, 1_000_001)]
        expected = [(x + 0.5 * y).square() for x, y in parts]
        program.run(parts, [99.0, 0.5])
        for (x, y), wanted in zip(parts, expected, strict=True):
            assert torch.equal(x, wanted) and torch.equal(y, -wanted)


def test_roots_are_those_of_torch() -> None:
    """Whose x86 builds take them with a function whose last bit may be another than that of the processor's."""
    if not use_torchs_sqrt():
        pytest.skip("this torch holds no vmsSqrt: its roots are the processor's")
    values = samples(300_001, 0).abs()
    out = torch.empty_like(values)
    for threads in (1, 3):
        torch.set_num_threads(threads)
        Program([Step("given_sqrt", 1, 0)], 2, 0).run([[values, out]], [])
        assert same_bits(out, values.sqrt())


def test_a_program_that_the_library_cannot_run_is_refused() -> None:
    with pytest.raises(KernelUnavailableError, match="no operation 'cosine'"):
        Program([Step("cosine", 0)], 1, 0)
    for memories, temporaries in ((0, 0), (1000, 0), (1, 1000)):
        with pytest.raises(KernelUnavailableError, match="too large"):
            Program([Step("copy", 0)], memories, temporaries)


def test_denormal_numbers_are_as_the_calling_thread_has_them() -> None:
    tiny = torch.full((200_000,), 1e-40)
    program = Program([Step("multiply_number", 1, 0)], 2, 0)
    try:
        for flushes in (False, True):
            if not torch.set_flush_denormal(flushes):
                pytest.skip("this processor cannot flush denormal numbers")
            out = torch.empty_like(tiny)
            program.run([[tiny, out]], [0.5])
            assert bool((out == 0).all()) is flushes
    finally:
        torch.set_flush_denormal(False)
