"""Every CUDA kernel compiles for every architecture, without a GPU, and with the arithmetic that was asked for."""

from __future__ import annotations

import re

import pytest

from bagua_core.kernels.formats import MINMAX_BLOCK, ONE_BIT_BLOCK
from bagua_core.kernels.on_gpu import KERNEL_NAMES, PASSES, PASSES_OF_ELEMENTS, passes_for
from tests.core.kernels.nvrtc import Nvrtc, library_path

ARCHITECTURES = ("sm_75", "sm_80", "sm_90")
DEFAULTS = sorted({passes_for(MINMAX_BLOCK), passes_for(ONE_BIT_BLOCK), PASSES_OF_ELEMENTS})
# Seconds each: all default block sizes for one architecture and the cheapest for the others; the rest on request.
CASES = [(a, p) for a in ARCHITECTURES for p in PASSES if p in DEFAULTS or a == "sm_80"]
QUICK = [(a, p) for a, p in CASES if p in DEFAULTS and (a == "sm_80" or p == DEFAULTS[0])]


@pytest.fixture(scope="module")
def nvrtc() -> Nvrtc:
    path = library_path()
    if path is None:
        pytest.skip(
            "no NVRTC; install the nvidia-cuda-nvrtc wheel (part of bagua-elastic[test] on Linux, x86_64)"
        )
    return Nvrtc(path)


@pytest.mark.parametrize(
    ("architecture", "passes"),
    [case if case in QUICK else pytest.param(*case, marks=pytest.mark.long) for case in CASES],
)
def test_kernels_compile(nvrtc: Nvrtc, architecture: str, passes: int) -> None:
    ptx = nvrtc.ptx(architecture, passes)
    assert sorted(re.findall(r"\.entry (\w+)", ptx)) == sorted(KERNEL_NAMES)
    instructions = set(re.findall(r"^\s*(?:@%p\d+ )?([a-z]\w*(?:\.\w+)+)\s", ptx, re.MULTILINE))
    arithmetic = {
        i
        for i in instructions
        if i.split(".")[0] in ("add", "sub", "mul", "div", "fma", "mad", "rcp", "sqrt")
    }
    floating = {i for i in arithmetic if i.endswith(("f32", "f64"))}
    assert {"add.rn.f32", "mul.rn.f32", "div.rn.f32", "sqrt.rn.f32"} <= floating
    exact = {"add.rn.f32", "sub.rn.f32", "mul.rn.f32", "div.rn.f32", "rcp.rn.f32", "sqrt.rn.f32"}
    assert floating <= exact, "contracted, flushed or approximate"
    assert not [i for i in instructions if i.split(".")[1:2] == ["local"]], "values left their registers"


def test_a_block_of_values_fits_its_thread_block() -> None:
    needed = {64: 1, 1024: 1, 1088: 2, 2048: 2, 2112: 4, 4096: 4, 4160: 8, 8192: 8}
    assert {size: passes_for(size) for size in needed} == needed
    assert PASSES_OF_ELEMENTS in PASSES
