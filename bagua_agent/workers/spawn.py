"""How a worker's process comes to be: own session, tied to the agent's life, held at a gate.

Uses vfork (no preexec_fn), so that the cost does not grow with the agent. The parent-death signal is
set by the runner in the child. Linux sends it when the *thread* that spawned ends, not the process:
call spawn_worker only from a thread that lives as long as the agent.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

from bagua_agent.job_config import WorkerCommand
from bagua_agent.workers.worker_command import PREIMPORT, check_command, command_line, worker_python
from bagua_agent.workers.worker_process import WorkerProcess
from bagua_contract.environment import PREFIX

GATE_VARIABLE = PREFIX + "GATE_FD"


def spawn_worker(
    command: WorkerCommand,
    env: Mapping[str, str],
    *,
    worker_id: str,
    slot: int,
    directory: Path | None = None,
    gated: bool = True,
    stdout: Path | None = None,
    stderr: Path | None = None,
    inherit_stdin: bool = False,
    preimport: tuple[str, ...] = PREIMPORT,
) -> WorkerProcess:
    """Start a worker; returns as soon as it is executed, before it has imported anything.

    env: its whole environment; BAGUA_GATE_FD in it is replaced, PYTHON_EXEC names another interpreter.
    gated: the script starts only after `open_gate()`. stdout, stderr: files to append to; None makes a
    pipe whose read end the result has. preimport: modules that the runner imports before the gate.
    Raises UserError when what the command names cannot be run.
    """
    where = Path.cwd() if directory is None else directory
    python = worker_python(env.get("PYTHON_EXEC"))
    check_command(command, where, python=python, path=env.get("PATH"))
    child_ends: list[int] = []  # closed here once the child has them
    own_ends: list[int] = []  # closed here only if there will be no child
    try:
        gate_fd: int | None = None
        gate_child = -1
        if gated:
            gate_child, gate_fd = os.pipe2(os.O_CLOEXEC)
            child_ends.append(gate_child)
            own_ends.append(gate_fd)
        out_child, out_fd = _stream_ends(stdout, child_ends, own_ends)
        err_child, err_fd = _stream_ends(stderr, child_ends, own_ends)
        popen = subprocess.Popen(
            command_line(command, os.getpid(), python=python, preimport=preimport),
            env={**env, GATE_VARIABLE: str(gate_child)},
            cwd=where,
            stdin=None if inherit_stdin else subprocess.DEVNULL,
            stdout=out_child,
            stderr=err_child,
            pass_fds=(gate_child,) if gated else (),
            start_new_session=True,
        )
        try:
            return WorkerProcess(worker_id, slot, popen, gate_fd, out_fd, err_fd)
        except OSError:  # no descriptor left for its pidfd
            popen.kill()
            popen.wait()
            raise
    except BaseException:
        for fd in own_ends:
            os.close(fd)
        raise
    finally:
        for fd in child_ends:
            os.close(fd)


def _stream_ends(file: Path | None, child_ends: list[int], own_ends: list[int]) -> tuple[int, int | None]:
    if file is not None:
        target = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        child_ends.append(target)
        return target, None
    read_end, write_end = os.pipe2(os.O_CLOEXEC)
    os.set_blocking(read_end, False)
    child_ends.append(write_end)
    own_ends.append(read_end)
    return write_end, read_end
