"""Waits for the end of a child process and sees it at once: Popen.wait with a timeout looks every 50 ms."""

from __future__ import annotations

import os
import subprocess

from bagua_agent.base.readable import readable


def wait_for_end(process: subprocess.Popen[bytes], timeout_s: float) -> int:
    """Reaps the process and returns its return code. No other thread may reap it meanwhile.

    Raises subprocess.TimeoutExpired if it has not ended within timeout_s.
    """
    if process.poll() is None:
        try:
            pidfd = os.pidfd_open(process.pid)
        except OSError:  # no descriptor is left: then as Popen does
            return process.wait(timeout_s)
        try:
            readable([pidfd], timeout_s)
        finally:
            os.close(pidfd)
    return process.wait(0)
