"""Every kind of command runs, and what cannot run is refused before anything starts."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

from bagua_agent.base.errors import UserError
from bagua_agent.config.job_config import CommandKind, WorkerCommand
from bagua_agent.workers.start.worker_command import check_command, command_line
from tests.agent.workers.worker_lab import EndedProcess, Workers, wait_until


@pytest.mark.parametrize(
    ("kind", "target", "named"),
    [
        (CommandKind.SCRIPT, "train.py", "script 'train.py' does not exist"),
        (CommandKind.SCRIPT, "train", "a module needs -m"),
        (CommandKind.RUN_PATH, "train.py", "script 'train.py' does not exist"),
        (CommandKind.EXECUTABLE, "no-such-program", "executable 'no-such-program' was not found"),
        (CommandKind.EXECUTABLE, "./plain.txt", "no execute permission"),
        (CommandKind.SCRIPT, "", "no script given"),
        (CommandKind.SCRIPT, "fifo", "script 'fifo' is a FIFO; use an ordinary file"),
        (CommandKind.RUN_PATH, "/dev/zero", "script '/dev/zero' is a character device"),
        (CommandKind.SCRIPT, "nu\0l.py", "does not exist"),
    ],
)
def test_what_cannot_run_is_named(tmp_path: Path, kind: CommandKind, target: str, named: str) -> None:
    (tmp_path / "plain.txt").write_text("")
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(UserError, match=named):
        check_command(WorkerCommand(kind, target), tmp_path)


def test_interpreter_that_cannot_run_is_named(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    with pytest.raises(UserError, match="'/no/python' cannot be executed"):
        check_command(WorkerCommand(CommandKind.SCRIPT, "train.py"), tmp_path, python="/no/python")


def test_spawn_refuses_before_it_starts(workers: Workers) -> None:
    with pytest.raises(UserError, match=r"missing\.py"):
        workers.start("missing.py", gated=True)
    assert not workers.started


def test_arguments_that_look_like_the_runners(workers: Workers) -> None:
    ended = workers.run_source("import sys\nprint(sys.argv[1:])\n", "--module", "--parent-pid", "1", "--")
    assert ended == EndedProcess(0, "['--module', '--parent-pid', '1', '--']\n", "")


def test_executable_waits_at_the_gate_and_keeps_its_pid(workers: Workers) -> None:
    worker = workers.start(
        "sh",
        "-c",
        'echo $$ "$0" ${BAGUA_GATE_FD-none}; exit 4',
        "zero",
        kind=CommandKind.EXECUTABLE,
        gated=True,
    )
    assert worker.reap() is None
    worker.open_gate()
    assert workers.to_end(worker) == EndedProcess(4, f"{worker.pid} zero none\n", "")


def test_executable_has_the_parent_death_signal(workers: Workers) -> None:
    source = """
import ctypes
value = ctypes.c_int()
ctypes.CDLL(None).prctl(2, ctypes.byref(value))
print(value.value)
"""
    for kind, target, rest in (
        (CommandKind.EXECUTABLE, sys.executable, (str(workers.script(source)),)),
        (CommandKind.SCRIPT, str(workers.script(source)), ()),
    ):
        ended = workers.to_end(workers.start(target, *rest, kind=kind))
        assert ended == EndedProcess(0, f"{int(signal.SIGKILL)}\n", "")


def test_executable_refused_at_the_gate(workers: Workers) -> None:
    worker = workers.start("sh", "-c", "echo ran", kind=CommandKind.EXECUTABLE, gated=True)
    worker.refuse_gate()
    assert workers.to_end(worker) == EndedProcess(0, "", "")


def test_executable_that_the_kernel_refuses(workers: Workers) -> None:
    odd = workers.script("\x7fnot a program", "odd")
    odd.chmod(0o755)
    ended = workers.to_end(workers.start("./odd", kind=CommandKind.EXECUTABLE))
    assert ended.returncode == 126
    assert "cannot run './odd'" in ended.stderr


def test_output_to_a_file(workers: Workers, tmp_path: Path) -> None:
    workers.script("print('out')\n")
    worker = workers.start("script.py", stdout=tmp_path / "out.log")
    assert worker.stdout_fd is None
    wait_until(lambda: worker.reap() is not None, "ended")
    assert (tmp_path / "out.log").read_text() == "out\n"


def test_command_line_of_a_module() -> None:
    line = command_line(WorkerCommand(CommandKind.MODULE, "pkg.train", ("-x",)), 7, preimport=("a", "b"))
    assert line[0] == sys.executable
    assert line[3:] == ["--parent-pid", "7", "--preimport", "a,b", "--module", "--", "pkg.train", "-x"]
