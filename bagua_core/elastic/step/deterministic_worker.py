"""Makes kernels, threads and random state equal on all workers of a deterministic job, and describes hardware.

Idempotent. A worker's runner applies it before the script; the engine does it again, for programs without that runner.
"""

from __future__ import annotations

import os
import platform
import random
import sys
from pathlib import Path

import torch

from bagua_core.errors import NotDeterministicError

FIRST_SEED = 0
"""Of a script that seeds nothing itself, so that all workers build the same model."""


def use_deterministic_kernels() -> None:
    """Has torch use deterministic algorithms or raise an error, choose no kernels by measured time, compile nothing,
    and use the job's number of threads."""
    # cuBLAS reads it with its first handle; the agent sets it too
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    # else every torch.empty is filled: memory that is read before it is written is a defect of the script's
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False
    # compiled code depends on the shapes that a process has seen before: a second one makes sizes dynamic
    torch.compiler.set_stance("force_eager")
    # TorchScript's profiling executor has other gradient formulas in a function's first calls
    torch._C._jit_set_profiling_executor(False)
    torch.set_num_threads(threads_in(os.environ.get("OMP_NUM_THREADS")))


def threads_in(variable: str | None) -> int:
    """Returns the number of threads of an operation on the CPU, whose sums depend on it: OMP_NUM_THREADS, or 1."""
    return int(variable) if variable and variable.isdecimal() and int(variable) else 1


def seed_before_script() -> None:
    """Gives all workers the same random state, whatever they are started from."""
    random.seed(FIRST_SEED)
    torch.manual_seed(FIRST_SEED)
    numpy = sys.modules.get("numpy")
    if numpy is not None and hasattr(numpy, "random"):
        numpy.random.seed(FIRST_SEED)


def deterministic_fingerprint(virtual_shards: int) -> dict[str, str]:
    """Returns what workers must have in common for equal bits; empty in other jobs."""
    if not virtual_shards:
        return {}
    gpus = torch.cuda.is_available() and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return {
        "virtual_shards": str(virtual_shards),
        "torch_build": torch.__version__,
        "processor": f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()} {_processor_model()}",
        "gpu": torch.cuda.get_device_name() if gpus else "none",
        "threads": str(torch.get_num_threads()),
        "mkl_mode": os.environ.get("MKL_CBWR", "not set"),
    }


def refuse_replicas(virtual_shards: int, replica_size: int) -> None:
    """Raises NotDeterministicError in a deterministic job in which several workers hold one replica: their sums are
    other than the tree's."""
    if virtual_shards and replica_size > 1:
        raise NotDeterministicError(
            f"--replica-size {replica_size} with --deterministic: the workers of a replica reduce among "
            "themselves in an order of their own; use one of them"
        )


def refuse_without_loader(virtual_shards: int) -> None:
    """Refuses a loop without the loader in a deterministic job: it has no shards. Raises NotDeterministicError."""
    if virtual_shards:
        raise NotDeterministicError(
            "a deterministic job cuts batches into virtual shards, which only bagua.ElasticDataLoader does; "
            "draw batches from it, or start the job without --deterministic"
        )


def _processor_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
