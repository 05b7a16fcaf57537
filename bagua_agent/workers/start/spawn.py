"""Starts a worker's process: its own session, tied to the agent's life, held at a gate.

Forked from the warm parent where that is the same (warm_fit.py). Else by vfork (no preexec_fn), so that the
cost does not grow with the agent. The parent-death signal is set by the runner in the child. Linux sends it
when the *thread* that spawned ends, not the process: call spawn_worker only from a thread that lives as long
as the agent.
"""

from __future__ import annotations

import errno
import os
import signal
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from bagua_agent.base.errors import BaguaError, InfrastructureLost, UserError
from bagua_agent.config.job_config import CommandKind, WorkerCommand
from bagua_agent.workers.process.account import Account
from bagua_agent.workers.process.stack_channel import DESCRIPTORS_VARIABLE, StackChannel
from bagua_agent.workers.process.worker_process import AdoptedProcess, WorkerProcess
from bagua_agent.workers.start.warm_fit import StartPlace
from bagua_agent.workers.start.warm_parent import WarmParent
from bagua_agent.workers.start.worker_command import PREIMPORT, check_command, command_line, worker_python
from bagua_contract.environment import PREFIX

GATE_VARIABLE = PREFIX + "GATE_FD"
_SHORTAGES = (errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE)


def spawn_worker(
    command: WorkerCommand,
    env: Mapping[str, str],
    *,
    worker_id: str,
    slot: int,
    directory: Path | None = None,
    gated: bool = True,
    stdout: Path | int | None = None,
    stderr: Path | int | None = None,
    inherit_stdin: bool = False,
    stdin: int | None = None,
    preimport: tuple[str, ...] = PREIMPORT,
    cpus: frozenset[int] | None = None,
    warm: WarmParent | None = None,
    account: Account | None = None,
) -> WorkerProcess:
    """Starts a worker; returns as soon as it is executed or forked.

    env: its whole environment; BAGUA_GATE_FD in it is replaced, PYTHON_EXEC names another interpreter. gated: the
    script starts only after `open_gate()`. stdout, stderr: files to append to, or descriptors to inherit; None makes a
    pipe whose read end the result has. stdin: a descriptor to use, which the caller closes. preimport: modules that a
    warm parent must have imported. cpus: the only processors it may use. warm: what to fork it from, if possible;
    waited for until it has imported everything. account: whose process it is; None: the agent's. Raises UserError when
    what the command names cannot be run, InfrastructureLost when the node is short of something.
    """
    where = Path.cwd() if directory is None else directory
    python = worker_python(env.get("PYTHON_EXEC"))
    check_command(command, where, python=python, path=env.get("PATH"))
    place = StartPlace(env, where, python, preimport, account, stays=directory is None)
    child_ends: list[int] = []  # closed here once the child has them
    own_ends: list[int] = []  # closed here only if there will be no child
    channel = None if command.kind is CommandKind.EXECUTABLE else StackChannel()
    try:
        if inherit_stdin:
            stdin = 0
        elif stdin is None:
            stdin = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
            child_ends.append(stdin)
        out_child, out_fd = _stream_ends(stdout, child_ends, own_ends)
        err_child, err_fd = _stream_ends(stderr, child_ends, own_ends)
        streams = (stdin, out_child, err_child)
        stack_ends = () if channel is None else channel.workers_ends
        forked = None if warm is None else _fork(warm, command, place, (*streams, *stack_ends), cpus)
        process, gate_fd = forked or _spawn(command, place, streams, stack_ends, cpus, gated=gated)
        try:
            worker = WorkerProcess(worker_id, slot, process, gate_fd, out_fd, err_fd, channel)
        except OSError:  # no descriptor left for its pidfd
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
            if gate_fd is not None:
                os.close(gate_fd)
            raise
        if not gated:
            worker.open_gate()
        return worker
    except BaseException as error:
        for fd in own_ends:
            os.close(fd)
        if channel is not None:
            channel.close()
        if isinstance(error, OSError):
            raise _not_started(error, worker_id) from error
        raise
    finally:
        for fd in child_ends:
            os.close(fd)
        if channel is not None:
            channel.passed()


def _not_started(error: OSError, worker_id: str) -> BaguaError:
    """Returns the error for a start that the kernel refused. It is refused again at every try, unless the node was
    short of something."""
    named = f" ({error.filename})" if error.filename is not None else ""
    said = f"worker {worker_id} can't be started: {error.strerror}{named}"
    return InfrastructureLost(said) if error.errno in _SHORTAGES else UserError(said)


Streams = tuple[int, int, int]


def _fork(
    warm: WarmParent,
    command: WorkerCommand,
    place: StartPlace,
    descriptors: tuple[int, ...],
    cpus: frozenset[int] | None,
) -> tuple[AdoptedProcess, int] | None:
    # With a gate in any case: should no answer come, whatever was forked ends when the gate is closed.
    gate_child, gate_fd = os.pipe2(os.O_CLOEXEC)
    try:
        pid = warm.fork(command, place, (*descriptors[:3], gate_child, *descriptors[3:]), cpus)
    except BaseException:
        os.close(gate_fd)
        raise
    finally:
        os.close(gate_child)
    if pid is None:
        os.close(gate_fd)
        return None
    return AdoptedProcess(pid), gate_fd


def _spawn(
    command: WorkerCommand,
    place: StartPlace,
    streams: Streams,
    stack_ends: tuple[int, ...],
    cpus: frozenset[int] | None,
    *,
    gated: bool,
) -> tuple[subprocess.Popen[bytes], int | None]:
    gate_child, gate_fd = os.pipe2(os.O_CLOEXEC) if gated else (-1, None)
    stdin, stdout, stderr = streams
    try:
        with _processors(cpus):
            popen = subprocess.Popen(
                command_line(command, os.getpid(), python=place.python),
                env={
                    **place.env,
                    GATE_VARIABLE: str(gate_child),
                    DESCRIPTORS_VARIABLE: ",".join(map(str, stack_ends)),
                },
                cwd=place.goes_to,
                stdin=stdin,
                stdout=stdout,
                stderr=stderr,
                pass_fds=(gate_child, *stack_ends) if gated else stack_ends,
                start_new_session=True,
                **(place.account.process_arguments if place.account else {}),
            )
    except BaseException:
        if gate_fd is not None:
            os.close(gate_fd)
        raise
    finally:
        if gated:
            os.close(gate_child)
    return popen, gate_fd


@contextmanager
def _processors(cpus: frozenset[int] | None) -> Iterator[None]:
    """Limits this thread to these processors within the block: what it starts inherits them from the first instruction
    on."""
    if cpus is None:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cpus)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _stream_ends(
    file: Path | int | None, child_ends: list[int], own_ends: list[int]
) -> tuple[int, int | None]:
    if isinstance(file, int):
        return file, None
    if file is not None:
        target = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        child_ends.append(target)
        return target, None
    read_end, write_end = os.pipe2(os.O_CLOEXEC)
    os.set_blocking(read_end, False)
    child_ends.append(write_end)
    own_ends.append(read_end)
    return write_end, read_end
