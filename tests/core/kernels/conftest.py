"""Every implementation of the kernels, under the public functions."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from bagua_core.kernels import cpu_library, targets
from bagua_core.kernels.compilation import CompilationError, find_compiler
from bagua_core.kernels.fallback import FallbackKernels
from bagua_core.kernels.interface import Kernels
from bagua_core.kernels.on_cpu import CpuKernels
from bagua_core.kernels.on_gpu import GpuKernels
from tests.core.kernels import emulated_gpu

IMPLEMENTATIONS = ("baseline", "avx2", "fallback", "emulated")


@pytest.fixture(scope="session")
def extension() -> CpuKernels:
    """The compiled library; skips only where nothing can compile it."""
    try:
        find_compiler()
    except CompilationError as error:
        pytest.skip(str(error))
    return CpuKernels(cpu_library.find().library)


@pytest.fixture(scope="session")
def emulation(tmp_path_factory: pytest.TempPathFactory) -> emulated_gpu.EmulatedLauncher:
    if emulated_gpu.compiler() is None:
        pytest.skip("no C++ compiler on PATH")
    return emulated_gpu.EmulatedLauncher(tmp_path_factory.mktemp("emulation"))


@pytest.fixture(params=IMPLEMENTATIONS)
def implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The public functions run on this implementation; its name."""
    name: str = request.param
    kernels: Kernels
    if name == "fallback":
        kernels = FallbackKernels()
    elif name == "emulated":
        kernels = GpuKernels(request.getfixturevalue("emulation"))
    else:
        library: CpuKernels = request.getfixturevalue("extension")
        if library.use_instruction_set(name) != name:
            library.use_instruction_set()
            pytest.skip(f"this processor has no {name}")
        kernels = library
    serve(monkeypatch, kernels, name)
    yield name
    if name in ("baseline", "avx2"):
        kernels.use_instruction_set()


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def serve(monkeypatch: pytest.MonkeyPatch, kernels: Kernels, name: str) -> None:
    """Let `kernels` serve all CPU tensors."""
    chosen = (targets.Target(name, "chosen by a test"), kernels)
    monkeypatch.setattr(targets, "_chosen_for", lambda device: chosen)
