"""Takes the place of `subprocess` in a daemon's child_units.py: the daemon's own zygote forks its units.

Loaded by path in the daemon's process (zygote_main.py).
"""

from __future__ import annotations

import os
import socket
import subprocess
import threading
from collections.abc import Sequence
from typing import BinaryIO

from bagua_agent.service.units import child_units
from bagua_agent.workers.exits.orphans import adopting
from bagua_agent.workers.process.request_socket import HelperGone, RequestSocket
from tests.lab.zygote import ForkedProcess

START_S = 20.0


class UnitStarter:
    DEVNULL, STDOUT = subprocess.DEVNULL, subprocess.STDOUT

    def __init__(self, requests: RequestSocket, holder_pid: int | None) -> None:
        self._requests, self._holder_pid = requests, holder_pid
        self._lock = threading.Lock()

    def Popen(
        self,
        argv: Sequence[str],
        *,
        stdout: BinaryIO,
        cwd: str,
        pass_fds: Sequence[int],
        **_: object,
    ) -> ForkedProcess:
        """The unit is a child of the daemon and leads a session; its output is appended to stdout's file."""
        request = {
            "argv": list(argv),
            "env": dict(os.environ),
            "output": stdout.name,
            "cwd": cwd,
            "holder": self._holder_pid,
            "module": "bagua_agent.service.units.run_unit",
        }
        try:
            with self._lock, adopting():
                answer = self._requests.ask(request, pass_fds, START_S)
        except HelperGone as gone:
            raise OSError(f"the lab's unit starter: {gone}") from gone
        if "pid" not in answer:
            raise OSError(f"the lab's unit starter: {answer}")
        return ForkedProcess(int(answer["pid"]))


def take_place(requests: socket.socket, holder_pid: int | None) -> None:
    child_units.subprocess = UnitStarter(RequestSocket(requests), holder_pid)  # type: ignore[assignment]
