"""The environment in which a benchmark starts its workers. The same for every system."""

from __future__ import annotations

import os

from benchmarks.result_file import ROOT


def worker_environment(**more: str) -> dict[str, str]:
    """The caller's without what a job of its own left there; one torch thread a worker; `more` on top."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("BAGUA_", "PET_", "TORCH"))}
    paths = os.pathsep.join([str(ROOT), str(ROOT / "protos")])
    return {**kept, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", **more}
