"""A process started on one of the lab's hosts."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.lab.wait import eventually
from tests.lab.zygote import ForkedProcess


class LabProcess:
    """Its exit status, output and end; ended with its host by the lab at the latest."""

    def __init__(
        self,
        enter: Sequence[str],
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None,
        output: Path | None,
        host_name: str,
        forked: ForkedProcess | None = None,
    ) -> None:
        """output: file that gets stdout and stderr, appended; None: they go nowhere. forked: the process, started
        already."""
        self.argv = tuple(argv)
        self.host_name = host_name
        self.output = output
        self._popen: subprocess.Popen[bytes] | ForkedProcess
        if forked is not None:
            self._popen = forked
            return
        with open(os.devnull if output is None else output, "ab") as stream:
            self._popen = subprocess.Popen(
                [*enter, *argv],
                env=None if env is None else dict(env),
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # a Ctrl-C at the test's terminal is not for it
            )

    @property
    def pid(self) -> int:
        return self._popen.pid

    @property
    def returncode(self) -> int | None:
        """None while it runs; negative for a signal."""
        return self._popen.poll()

    @property
    def is_running(self) -> bool:
        return self.returncode is None

    def wait(self, deadline_s: float) -> int:
        """Its exit code. Raises AssertionError, with the end of its output, if it still runs then."""
        eventually(lambda: not self.is_running, deadline_s, lambda: f"{self} has ended\n{self.tail()}")
        return self._popen.wait(deadline_s)

    def send(self, number: signal.Signals) -> None:
        """Send a signal; none if it has ended."""
        self._popen.send_signal(number)

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone. Its children live on."""
        self._popen.kill()
        self.wait(10)

    def text(self) -> str:
        """All it wrote so far."""
        if self.output is None or not self.output.exists():
            return ""
        return self.output.read_text(errors="replace")

    def tail(self, lines: int = 30) -> str:
        return "\n".join(self.text().splitlines()[-lines:])

    def __repr__(self) -> str:
        name = os.path.basename(self.argv[0])
        return f"<{name} on {self.host_name}, pid {self.pid}, exit {self._popen.returncode}>"
