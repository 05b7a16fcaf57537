"""How long the steps of a test's script last, until the test has seen what it came for.

A step costs every worker some milliseconds of processor time, so a job has few. It must not end before its test has
started another node or killed a worker, on a busy machine either: so its last steps last longer and longer, and all are
short once there is <out>/hurry. While other work shares the machine, slow steps last longer in proportion, as the
starts of other nodes do.
"""

from __future__ import annotations

import time
from pathlib import Path

from tests.lab.machine_load import load

QUICK_S, SLOW_S = 0.1, 1.0
GROWING = 6  # of the last steps, each of which lasts twice as long as the one before it: two minutes together
_LOOK_EVERY_S = 0.05


def least_s(step: int, steps: int, quick_s: float = QUICK_S, slow_s: float = SLOW_S) -> float:
    """The least duration of `step`, counted from 0, in a job of `steps`, in seconds."""
    if step < steps // 2:
        return quick_s
    return slow_s * 2.0 ** max(0, step - (steps - 1 - GROWING))


def wait(out: Path, until_s: float) -> None:
    """Until that time of time.monotonic(), of a slow step later on a busy machine; or until there is `out`/hurry."""
    last_s = time.monotonic()
    is_slow = until_s - last_s > SLOW_S / 2
    while not (out / "hurry").exists() and (left_s := until_s - last_s) > 0:
        time.sleep(min(left_s, _LOOK_EVERY_S))
        now_s = time.monotonic()
        if is_slow:
            until_s += (now_s - last_s) * (1.0 - 1.0 / load())
        last_s = now_s
