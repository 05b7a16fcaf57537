"""The rivals' workload with triggers for each host: a file `<what>-<host>` in $FAULT_DIRECTORY.

<what> is `raise`, `hang` or `disagree` (of Bagua: a collective that the other ranks do not call).

It is copied to a job's script directory as workload.py, so that every system's own script runs unchanged.
A trigger works once, in the middle of a step; `<what>-<host>.at` then holds when, in seconds since 1970.
"""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

from benchmarks.rivals import workload as _workload
from benchmarks.rivals.workload import Samples, StepLog, mlp

__all__ = ["Samples", "StepLog", "device_time", "mlp"]

_HANGS_S = 600.0  # the benchmark ends its processes long before


def device_time() -> None:
    """As the workload's, and what a trigger asks for."""
    if _is_asked("raise"):
        raise ValueError("told to fail")
    if _is_asked("hang"):
        threading.Event().wait(_HANGS_S)
    if _is_asked("disagree"):
        import bagua_core  # the rivals' processes do without it

        bagua_core.barrier()
    _workload.device_time()


def _is_asked(what: str) -> bool:
    path = Path(os.environ["FAULT_DIRECTORY"]) / f"{what}-{os.uname().nodename}"
    try:
        path.unlink()
    except FileNotFoundError:
        return False
    half = path.with_suffix(".half")
    half.write_text(repr(time.time()))
    half.rename(path.with_suffix(".at"))
    return True
