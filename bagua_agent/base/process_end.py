"""Waits for the end of a child process and sees it at once: Popen.wait with a timeout looks every 50 ms."""

from __future__ import annotations

import os
import subprocess
import time
from typing import Any, Protocol

from bagua_agent.base.readable import readable

_POLL_S = 0.05  # as Popen.wait does


class Child(Protocol):
    """A child of this process: a Popen, or one that was there before this program. args: for error messages."""

    pid: int

    @property
    def args(self) -> Any: ...

    def poll(self) -> int | None:
        """Reaps the process if it has ended. Returns its return code; None if it has not ended."""


def wait_for_end(process: Child, timeout_s: float) -> int:
    """Reaps the process and returns its return code. No other thread may reap it meanwhile.

    Raises subprocess.TimeoutExpired if it has not ended within timeout_s.
    """
    deadline_s = time.monotonic() + timeout_s
    code = process.poll()
    if code is None:
        try:
            pidfd = os.pidfd_open(process.pid)
        except OSError:  # no descriptor is left
            while (code := process.poll()) is None and (left_s := deadline_s - time.monotonic()) > 0:
                time.sleep(min(_POLL_S, left_s))
        else:
            try:
                readable([pidfd], timeout_s)
            finally:
                os.close(pidfd)
            code = process.poll()
    if code is None:
        raise subprocess.TimeoutExpired(process.args, timeout_s)
    return code
