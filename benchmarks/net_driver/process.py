"""One process of the driver: a line for each call, and its answer."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from bagua_agent.base.readable import readable
from tests.lab import namespaces
from tests.lab.network import Host

ANSWER_TIMEOUT_S = 20.0
EXIT_TIMEOUT_S = 20.0


class DriverError(RuntimeError):
    """The driver ended, did not answer in time, or refused a line."""


class CallFailedError(DriverError):
    """The network returned an error; `result` is NCCL's code."""

    def __init__(self, line: str, answer: str) -> None:
        super().__init__(f"{line[:80]}: {answer}")
        self.result = int(answer.split()[1]) if answer.split()[1].isdecimal() else None


class Driver:
    """A context manager. words: of driver.cc's command line; host: of a lab, None: this machine."""

    def __init__(
        self,
        program: Path,
        words: Sequence[str | Path],
        env: Mapping[str, str] | None = None,
        host: Host | None = None,
    ) -> None:
        entrance = []
        if host is not None:
            nsenter = shutil.which("nsenter") or "nsenter"
            entrance = [nsenter, f"--net={namespaces.NETNS_DIR / host.namespace}", "--"]
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115  closed in __exit__
        self._process = subprocess.Popen(
            [*entrance, str(program), *map(str, words)],
            env={**os.environ, **(env or {})},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
        )
        self._pending = ""
        self._rest = b""
        self.pid = self._process.pid
        try:
            self.network = self.finish()[0]
        except BaseException:
            self.kill()
            raise

    def ask(self, line: str, timeout_s: float = ANSWER_TIMEOUT_S) -> list[str]:
        """The words after "ok". Raises CallFailedError, and DriverError if there is no answer in time."""
        self.begin(line)
        return self.finish(timeout_s)

    def begin(self, line: str) -> None:
        """Write a line whose answer `finish` reads."""
        assert self._process.stdin is not None
        self._pending = line
        try:
            self._process.stdin.write(f"{line}\n".encode())
            self._process.stdin.flush()
        except BrokenPipeError as error:
            raise DriverError(f"{line[:80]}: the driver ended\n{self.errors()}") from error

    def finish(self, timeout_s: float = ANSWER_TIMEOUT_S) -> list[str]:
        answer = self._line(timeout_s)
        kind, _, rest = answer.partition(" ")
        if kind == "failed":
            raise CallFailedError(self._pending, answer)
        if kind != "ok":
            raise DriverError(answer)
        return rest.split()

    def _line(self, timeout_s: float) -> str:
        assert self._process.stdout is not None
        deadline_s = time.monotonic() + timeout_s
        while b"\n" not in self._rest:
            left_s = deadline_s - time.monotonic()
            if left_s <= 0 or not readable([self._process.stdout], left_s):
                raise DriverError(f"{self._pending[:80]}: no answer in {timeout_s:g} s\n{self.errors()}")
            chunk = os.read(self._process.stdout.fileno(), 65536)
            if not chunk:
                code = self._process.wait(EXIT_TIMEOUT_S)
                raise DriverError(f"{self._pending[:80]}: the driver ended with {code}\n{self.errors()}")
            self._rest += chunk
        line, _, self._rest = self._rest.partition(b"\n")
        return line.decode()

    def usage(self) -> dict[str, float]:
        """descriptors, threads and cpu_s of the process."""
        return {name: float(value) for name, value in (word.split("=") for word in self.ask("usage"))}

    def send_signal(self, number: int) -> None:
        self._process.send_signal(number)

    def errors(self) -> str:
        """The last lines of standard error: a sanitizer's report, for one."""
        self._errors.seek(0)
        return "".join(self._errors.readlines()[-1000:])

    def close(self) -> int:
        """End of input; the exit status. Kills a driver that does not end."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.close()
            return self._process.wait(EXIT_TIMEOUT_S)
        except (BrokenPipeError, subprocess.TimeoutExpired) as error:
            raise DriverError(f"the driver does not end: {error}\n{self.errors()}") from error
        finally:
            self.kill()

    def kill(self) -> None:
        """SIGKILL; returns when it is gone."""
        self._process.kill()
        self._process.wait(EXIT_TIMEOUT_S)
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None and not stream.closed:
                try:
                    stream.close()
                except BrokenPipeError:
                    continue  # a line that the driver never read

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()
        self._errors.close()
