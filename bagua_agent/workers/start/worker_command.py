"""Builds the command line that runs the user's program, and checks that it can run.

Owns the four kinds of command (script, -m module, --no-python executable, --run-path) as argument
vectors, and the check that the target exists before anything is started. Starts nothing.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from pathlib import Path

from bagua_agent.base.errors import InternalError, UserError
from bagua_agent.config.job_config import CommandKind, WorkerCommand
from bagua_agent.workers.process.foreign_files import why_no_script

# What a warm parent imports before there are workers.
PREIMPORT = ("torch", "bagua_core", "grpc")


def worker_python(env_python: str | None) -> str:
    """Returns the workers' interpreter: PYTHON_EXEC's value, as torchrun has it, or the agent's own."""
    return env_python or sys.executable


def check_command(
    command: WorkerCommand, directory: Path, *, python: str = sys.executable, path: str | None = None
) -> None:
    """Checks that the command can be run from `directory`. Raises UserError naming the target if it can't.

    path: PATH of the worker. A module is not looked for: finding it would import its parent packages.
    """
    name = command.target
    if not name:
        raise UserError("no script given; name the script that the workers run")
    if command.kind is CommandKind.EXECUTABLE:
        if shutil.which(str(directory / name) if "/" in name else name, path=path) is None:
            raise UserError(f"executable {name!r} was not found or has no execute permission; check its path")
        return
    if shutil.which(python, path=path) is None:
        raise UserError(f"Python interpreter {python!r} cannot be executed; check PYTHON_EXEC")
    if command.kind is CommandKind.MODULE:
        return
    script = directory / name
    try:
        other_kind = why_no_script(script)
    except (OSError, ValueError):  # ValueError: it holds a NUL
        hint = "" if name.endswith(".py") else " (a module needs -m, an executable --no-python)"
        raise UserError(f"script {name!r} does not exist in {directory}; check the path{hint}") from None
    if other_kind is not None:
        raise UserError(f"script {name!r} is {other_kind}; use an ordinary file")
    if not os.access(script, os.R_OK):
        raise UserError(f"script {name!r} cannot be read; check its permissions")


def command_line(
    command: WorkerCommand,
    parent_pid: int,
    *,
    python: str = sys.executable,
    preimport: tuple[str, ...] = (),
) -> list[str]:
    """Returns the argument vector that the agent of process id `parent_pid` starts. preimport: of a warm parent."""
    if command.kind is CommandKind.EXECUTABLE:
        runner = Path(__file__).with_name("run_executable.py")
        isolated = [sys.executable, "-I", "-S", "-E", str(runner), str(parent_pid)]
        return [*isolated, command.target, *command.args]
    line = [python, "-u", str(_script_runner()), "--parent-pid", str(parent_pid)]
    if preimport:
        line += ["--preimport", ",".join(preimport)]
    if command.kind is CommandKind.MODULE:
        line.append("--module")
    elif command.kind is CommandKind.RUN_PATH:
        line.append("--run-path")
    return [*line, "--", command.target, *command.args]


def _script_runner() -> Path:
    return beside_runner("run_script.py")


def beside_runner(name: str) -> Path:
    """Returns the path of a file of bagua_core.worker that is run by path."""
    # Located, not imported: importing bagua_core would bring torch into the agent.
    spec = importlib.util.find_spec("bagua_core")
    for place in (spec.submodule_search_locations if spec else None) or ():
        file = Path(place).absolute() / "worker" / name
        if file.is_file():
            return file
    raise InternalError(f"bagua_core/worker/{name} is not installed beside bagua_agent")
