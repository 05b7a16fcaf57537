"""Real workers for tests: everything that a test starts is ended by its id."""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from bagua_agent.base.readable import readable
from bagua_agent.config.job_config import CommandKind, WorkerCommand
from bagua_agent.workers.process.account import Account
from bagua_agent.workers.process.worker_process import WorkerProcess
from bagua_agent.workers.start.spawn import spawn_worker
from bagua_agent.workers.start.warm_parent import WarmParent
from tests.lab.machine_load import Deadline
from tests.lab.wait import eventually

DEADLINE_S = 20.0


@dataclass(frozen=True)
class EndedProcess:
    returncode: int
    stdout: str
    stderr: str


def wait_until(condition: Callable[[], object], what: str, deadline_s: float = DEADLINE_S) -> None:
    eventually(condition, deadline_s, what, 0.005)


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.NoSuchProcess:
        return False


def base_environment() -> dict[str, str]:
    """Ours, without what pytest changes from test to test."""
    return {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}


class Workers:
    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.started: list[WorkerProcess] = []

    def script(self, source: str, name: str = "script.py") -> Path:
        path = self.directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
        return path

    def start(
        self,
        target: str | Path,
        *args: str,
        kind: CommandKind = CommandKind.SCRIPT,
        env: Mapping[str, str] | None = None,
        gated: bool = False,
        slot: int = 0,
        worker_id: str | None = None,
        preimport: tuple[str, ...] = (),
        stdout: Path | None = None,
        cpus: frozenset[int] | None = None,
        warm: WarmParent | None = None,
        account: Account | None = None,
    ) -> WorkerProcess:
        """warm: waits until it is ready, as a node's first start does."""
        if warm is not None:
            warm.wait_ready()
        worker = spawn_worker(
            WorkerCommand(kind, str(target), args),
            {**base_environment(), **(env or {})},
            worker_id=worker_id or f"w{len(self.started)}",
            slot=slot,
            directory=self.directory,
            gated=gated,
            stdout=stdout,
            preimport=preimport,
            cpus=cpus,
            warm=warm,
            account=account,
        )
        self.started.append(worker)
        return worker

    def run_source(
        self, source: str, *args: str, env: Mapping[str, str] | None = None, preimport: tuple[str, ...] = ()
    ) -> EndedProcess:
        self.script(source)
        return self.to_end(self.start("script.py", *args, env=env, preimport=preimport))

    def to_end(self, worker: WorkerProcess) -> EndedProcess:
        """Read both pipes to their end, and reap."""
        parts: dict[int, bytes] = {fd: b"" for fd in (worker.stdout_fd, worker.stderr_fd) if fd is not None}
        order = list(parts)
        poll = select.poll()
        for fd in parts:
            poll.register(fd, select.POLLIN)
        deadline, left = Deadline(DEADLINE_S), len(parts)
        while left:
            assert not deadline.is_over(), f"the worker did not end within {deadline}: {parts}"
            for fd, _ in poll.poll(100):
                data = os.read(fd, 65536)
                parts[fd] += data
                if not data:
                    poll.unregister(fd)
                    left -= 1
        wait_until(lambda: worker.reap() is not None, "worker reaped")
        assert worker.returncode is not None
        out, err = (parts[fd].decode() for fd in order) if len(order) == 2 else ("", parts[order[0]].decode())
        return EndedProcess(worker.returncode, out, err)

    def read_line(self, worker: WorkerProcess) -> str:
        assert worker.stdout_fd is not None
        line = b""
        deadline = Deadline(DEADLINE_S)
        while not line.endswith(b"\n"):
            assert not deadline.is_over(), f"no line within {deadline}, only {line!r}"
            if readable([worker.stdout_fd], 0.1):
                data = os.read(worker.stdout_fd, 1)
                assert data, f"end of output after {line!r}"
                line += data
        return line.decode()

    def clean_up(self) -> None:
        for worker in self.started:
            worker.signal_group(signal.SIGKILL)
        for worker in self.started:
            wait_until(lambda worker=worker: worker.reap() is not None, "killed worker reaped")  # type: ignore[misc]
            for fd in (worker.stdout_fd, worker.stderr_fd):
                if fd is not None:
                    os.close(fd)
            worker.close()
