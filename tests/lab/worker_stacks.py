"""The stacks of a job's workers, for a test whose job hangs: it takes the agent's channel without the agent.

An agent that hangs too answers no request, so the signal is sent from here (bagua_core/worker/stack_dump.py).
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from pathlib import Path

_NAME = "/memfd:bagua-stacks-"
_PATIENCE_S = 2.0  # faulthandler writes within microseconds of the signal, once the process runs


def stacks(pids: Iterable[int]) -> str:
    """What each of these processes does now, a paragraph each; the reason instead where it can't be had."""
    return "\n".join(f"-- worker process {pid}\n{_of(pid)}" for pid in pids)


def _of(pid: int) -> str:
    try:
        file = next(d for d in Path("/proc", str(pid), "fd").iterdir() if os.readlink(d).startswith(_NAME))
        before = file.read_bytes()
        os.kill(pid, int(before.split(b" ", 1)[0]))
        until_s = time.monotonic() + _PATIENCE_S
        while (answer := file.read_bytes()[len(before) :]).count(b"\n") < 2 and time.monotonic() < until_s:
            time.sleep(0.05)
    except (OSError, StopIteration, ValueError) as error:
        return f"no stacks: {error!r}"
    return answer.decode(errors="replace")
