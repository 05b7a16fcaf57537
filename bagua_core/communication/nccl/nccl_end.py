"""Ends a NCCL communicator in bounded time.

ncclCommAbort ends the kernels of a communicator and then gives its memory back. If it does not return, kernels of a
lost generation still hold the GPU: the script's stream waits for them, and the script's next read of a value never
returns. Only the end of the process ends them. It ends by SIGKILL, which does not count as a failure of the script.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable

from bagua_core.communication.communicator import AbortFlag
from bagua_core.communication.nccl.nccl_library import NcclHandle

_LOOK_S = 0.01

# An abort takes milliseconds, and seconds on a host that is short of processors.
ABORT_LIMIT_S = 30.0


def end_process(limit_s: float) -> None:
    print(
        f"bagua: ncclCommAbort did not return within {limit_s:g} s, so this worker can't use its GPU; it ends",
        file=sys.stderr,
        flush=True,
    )
    os.kill(os.getpid(), signal.SIGKILL)


def bounded(
    abort: Callable[[], object],
    limit_s: float | None = None,
    stuck: Callable[[float], None] | None = None,
) -> None:
    """Calls `abort`. If that takes longer than limit_s, stuck(limit_s) is called in a thread of its own.

    Default: end_process after ABORT_LIMIT_S.
    """
    limit_s = ABORT_LIMIT_S if limit_s is None else limit_s
    stuck = end_process if stuck is None else stuck
    returned = threading.Event()

    def guard() -> None:
        if not returned.wait(limit_s):
            stuck(limit_s)

    threading.Thread(target=guard, name="nccl-abort-guard", daemon=True).start()
    try:
        abort()
    finally:
        returned.set()


def abort_handle(handle: NcclHandle) -> None:
    bounded(handle.abort)


class Aborts:
    """Counts the aborts of this process that have not returned: kernels of lost generations may still run."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._count = 0

    def begin(self) -> None:
        with self._changed:
            self._count += 1

    def returned(self) -> None:
        with self._changed:
            self._count -= 1
            self._changed.notify_all()

    def wait(self, abort_flag: AbortFlag) -> None:
        """Waits until all aborts have returned; `bounded` ends the process if one does not. Raises
        CollectiveAborted."""
        with self._changed:
            while self._count:
                abort_flag.check()
                self._changed.wait(_LOOK_S)


ABORTS = Aborts()
