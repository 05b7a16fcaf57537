"""The environment in which a benchmark starts its workers. The same for every system."""

from __future__ import annotations

import compileall
import os
from collections.abc import Iterator
from contextlib import contextmanager

from benchmarks.result_file import ROOT

# glibc gives freed gradients back to the system in each step, or never, depending on what lies above them in its heap.
# Giving back costs up to a third of a step of a model of 17 M parameters, in any system. 32 MiB is the most it takes.
_KEEPS_FREED_MEMORY = {"MALLOC_TRIM_THRESHOLD_": str(1 << 32), "MALLOC_MMAP_THRESHOLD_": str(1 << 25)}


_PACKAGES = ("bagua_agent", "bagua_core", "bagua_launch", "bagua_torchrun", "protos", "benchmarks")


def compile_packages() -> None:
    """Compiles this checkout's modules, as pip does when it installs them: else each process of each trial may compile
    them anew, which takes more than a second where PYTHONDONTWRITEBYTECODE is set."""
    for package in _PACKAGES:
        compileall.compile_dir(ROOT / package, quiet=1)


def worker_environment(**more: str) -> dict[str, str]:
    """The caller's without what a job of its own left there; one torch thread a worker; freed memory is
    kept; `more` on top."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("BAGUA_", "PET_", "TORCH"))}
    paths = os.pathsep.join([str(ROOT), str(ROOT / "protos")])
    return {**kept, **_KEEPS_FREED_MEMORY, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", **more}


@contextmanager
def worker_environment_here() -> Iterator[None]:
    """Within it this process has the workers' environment, for a zygote (tests/lab/zygote.py) that begins meanwhile: a
    process that is forked from it does not read again what libraries read when they are loaded."""
    before = dict(os.environ)
    os.environ.update(worker_environment())
    del os.environ["PYTHONPATH"]  # the zygote adds it
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
