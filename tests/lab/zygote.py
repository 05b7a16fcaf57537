"""Starts agents on the lab's hosts beside a warm parent whose imports are done already.

An agent's warm parent takes two to three seconds of processor time to import torch, the agent itself half a second, and
most tests start several. One process of the test run, the zygote, imports everything once. For each agent it forks the
process that will be the agent, which enters the host, forks its warm parent and then runs the agent's command line: it
finds a child that waits for its orders. A daemon of service mode starts its units in this way. Another module
(`python -m MODULE`) runs in a forked process too, without a warm parent. A command line that names no module, or has
another import path, is executed as a program of its own. The zygote starts no thread. A framework that all workers of
a job import (seconds of processor time each) can be imported once for them: IMPORTS_VARIABLE.

A start that differs in what libraries read when they are loaded, or whose host has a clock of its own, is not for it.
"""

from __future__ import annotations

import atexit
import functools
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

from bagua_agent.node.environment_of_workers import NO_GRPC_FORK_HANDLERS
from bagua_agent.node.node_workers import TRAINING_IMPORTS
from bagua_agent.workers.exits.orphans import adopting
from bagua_agent.workers.process.request_socket import HelperGone, RequestSocket
from bagua_agent.workers.start.library_variables import is_read_at_load
from bagua_agent.workers.start.warm_parent import OFFER_VARIABLE
from bagua_agent.workers.start.worker_command import PREIMPORT, beside_runner
from tests.lab.wait import patiently

REAL_START_VARIABLE = "BAGUA_TESTS_REAL_START"
# of an agent: further modules that its warm parent imports, with commas
IMPORTS_VARIABLE = "BAGUA_TESTS_IMPORTS"
_PROGRAM = Path(__file__).with_name("zygote_main.py")
_ROOT = Path(__file__).resolve().parents[2]
# Its frames are below every worker's script, so they have no file's name: a traceback's last frame is the script's.
_START = "import sys; exec(compile(open(sys.argv[1]).read(), '<zygote>', 'exec'))"
QUIET_GRPC = {"GRPC_VERBOSITY": "NONE"}  # as keep_quiet() has it, before gRPC is imported
# Read after every fork: when the first group is made, or something is compiled. Torch sets the second in this process.
_READ_LATER = {"GLOO_SOCKET_IFNAME", "TORCHINDUCTOR_CACHE_DIR", "TORCHINDUCTOR_COMPILE_THREADS"}
DAEMON = "bagua_agent.service"
_READY_S = 300.0  # of a machine that is busy with other work too
_START_S = 60.0
_one_request = threading.Lock()  # a test may start the agents of two nodes from two threads


class ForkedProcess:
    """What LabProcess uses of Popen, for a child that Popen did not start."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._pidfd = os.pidfd_open(pid)
        # Tests look from several threads, and the first that sees the end reaps it
        self._one_look = threading.Lock()

    def poll(self) -> int | None:
        with self._one_look:
            if self.returncode is None:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
                if pid:
                    self.returncode = os.waitstatus_to_exitcode(status)
            return self.returncode

    def __del__(self) -> None:
        os.close(self._pidfd)  # not before: another thread may wait for it

    def wait(self, timeout: float | None = None) -> int:
        if self.poll() is None:
            poll = select.poll()
            poll.register(self._pidfd, select.POLLIN)
            if not poll.poll(None if timeout is None else timeout * 1000):
                raise subprocess.TimeoutExpired(["bagua-launch"], timeout or 0.0)
            self.poll()
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: signal.Signals) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def can_start(argv: Sequence[str], environment: Mapping[str, str]) -> bool:
    """Whether the workers of what `argv` starts may share what the zygote has loaded.

    A daemon is never executed as a program of its own beside a warm parent: it would not use the parent.
    """
    if list(argv[1:3]) == ["-m", DAEMON] and module_of(argv, environment) is None:
        return False
    if os.environ.get(REAL_START_VARIABLE) or "LD_PRELOAD" in environment:
        return False
    ours = _environment()
    names = {name for name in environment.keys() | ours.keys() if is_read_at_load(name)} - _READ_LATER
    return all(environment.get(name) == ours.get(name) for name in names)


def start(
    argv: Sequence[str],
    environment: Mapping[str, str],
    output: Path,
    directory: str,
    holder_pid: int | None,
    *,
    stdin: Path | None = None,
    errors: Path | None = None,
) -> ForkedProcess:
    """holder_pid: a process in the namespaces to enter; None: stay here. errors: for stderr; None: `output` too."""
    request = {
        "argv": list(argv),
        "env": dict(environment),
        "output": str(output),
        "cwd": directory,
        "holder": holder_pid,
        "module": module_of(argv, environment),
        "stdin": stdin and str(stdin),
        "errors": errors and str(errors),
    }
    output.open("ab").close()  # as Popen's caller has it: there when this returns
    with _one_request, adopting():
        try:
            answer = _zygote().ask(request, (), _START_S)
        except HelperGone:
            _zygote.cache_clear()  # a late answer would be taken for that of the next request
            raise
    assert "pid" in answer, f"the zygote did not start {argv}: {answer}"
    return ForkedProcess(int(answer["pid"]))


def run(
    argv: Sequence[str], environment: Mapping[str, str], output: Path, directory: Path, limit_s: float
) -> int:
    """The exit code of an agent on this host, started here where that can be done; it writes to `output`.

    Raises subprocess.TimeoutExpired after limit_s, when it is killed.
    """
    if not can_start(argv, environment):
        with output.open("ab") as stream:
            return subprocess.run(
                argv,
                env=environment,
                stdout=stream,
                stderr=stream,
                cwd=directory,
                timeout=limit_s,
                check=False,
            ).returncode
    process = start(argv, environment, output, str(directory), None)
    try:
        return process.wait(limit_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(_START_S)
        raise


def run_captured(
    argv: Sequence[str], environment: Mapping[str, str], directory: Path, stdin: str, limit_s: float
) -> subprocess.CompletedProcess[str]:
    """As subprocess.run with both streams captured, for what `can_start` allows. Raises subprocess.TimeoutExpired."""
    with tempfile.TemporaryDirectory() as folder:
        given, output, errors = (Path(folder, name) for name in ("stdin", "output", "errors"))
        given.write_text(stdin)
        process = start(argv, environment, output, str(directory), None, stdin=given, errors=errors)
        try:
            code = patiently(process.wait, limit_s)
        except subprocess.TimeoutExpired as late:
            process.kill()
            process.wait(_START_S)
            late.stdout, late.stderr = output.read_bytes(), errors.read_bytes()
            raise
        return subprocess.CompletedProcess(list(argv), code, output.read_text(), errors.read_text())


def module_of(argv: Sequence[str], environment: Mapping[str, str]) -> str | None:
    """The module that the zygote can run in a forked process; None: the command line is to be executed."""
    same_imports = environment.get("PYTHONPATH") == _environment()["PYTHONPATH"]
    return argv[2] if same_imports and list(argv[:2]) == [sys.executable, "-m"] else None


def _environment() -> dict[str, str]:
    own = {k: v for k, v in os.environ.items() if not k.startswith(("BAGUA_", "PET_"))}
    paths = [str(_ROOT), str(_ROOT / "protos"), os.environ.get("PYTHONPATH", "")]
    return {**own, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "OMP_NUM_THREADS": "1"}


@functools.cache
def _zygote() -> RequestSocket:
    own, other = RequestSocket.pair()
    runner, imports = str(beside_runner("run_script.py")), ",".join((*PREIMPORT, *TRAINING_IMPORTS))
    with other:
        process = subprocess.Popen(
            [
                sys.executable,
                "-u",
                "-c",
                _START,
                str(_PROGRAM),
                str(other.fileno()),
                runner,
                imports,
                OFFER_VARIABLE,
            ],
            env={**_environment(), **NO_GRPC_FORK_HANDLERS, **QUIET_GRPC},
            stdin=subprocess.DEVNULL,
            pass_fds=(other.fileno(),),
            start_new_session=True,
        )
    atexit.register(_end, process, own)
    own.receive(_READY_S)
    return own


def _end(process: subprocess.Popen[bytes], requests: RequestSocket) -> None:
    requests.close()
    try:
        process.wait(_START_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
