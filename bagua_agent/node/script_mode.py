"""How will a script's workers follow a new generation: in process, or by being started again?

Looks at the program's text without running it: whoever calls `init_process_group` of `bagua_core` follows in process,
anything else knows nothing of this runtime and is restarted. A guess only: a worker that opens a session all the
same makes its job LIVE (see membership/picture.py), so a wrong guess costs nothing but a later start.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from bagua_agent.job_config import CommandKind, WorkerCommand
from bagua_agent.workers.foreign_files import read_ordinary
from bagua_contract import membership_pb2 as pb

OWN_PACKAGE = "bagua_core"
OPENS_A_SESSION = "init_process_group"
LARGEST_SCRIPT_BYTES = 1 << 20  # what is larger was made by a machine, and takes long to parse


class Mode(Enum):
    LIVE = pb.JobSpec.LIVE
    RESTART = pb.JobSpec.RESTART


@dataclass(frozen=True, slots=True)
class Guess:
    mode: Mode
    reason: str


def guess_mode(command: WorkerCommand, directory: Path, search_path: Iterable[str] | None = None) -> Guess:
    """directory: where the command runs. search_path: where modules are looked for; None: this interpreter's."""
    if command.kind is CommandKind.EXECUTABLE:
        return Guess(Mode.RESTART, f"{command.target} is an executable")
    if command.kind is CommandKind.MODULE:
        paths = [directory, *(Path(p) for p in (sys.path if search_path is None else search_path) if p)]
        file = _module_file(command.target, paths)
    else:
        file = directory / command.target
        try:
            if file.is_dir():
                file = file / "__main__.py"
        except OSError as error:  # its name is too long
            return Guess(Mode.RESTART, f"{command.target[:40]!r} can't be looked at ({error.strerror})")
    if file is None:
        return Guess(Mode.RESTART, f"module {command.target} was not found as a file")
    try:
        text = read_ordinary(file, LARGEST_SCRIPT_BYTES, follow_links=True)
    except (OSError, ValueError) as error:  # ValueError: its name holds a NUL
        return Guess(Mode.RESTART, f"{file.name!r} can't be read ({getattr(error, 'strerror', error)})")
    try:
        opens = opens_a_session(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        # not Python source (a zip file, compiled code), or broken: running it says so
        return Guess(Mode.RESTART, f"{file.name} can't be parsed")
    if opens:
        return Guess(Mode.LIVE, f"{file.name} calls {OWN_PACKAGE}.{OPENS_A_SESSION}")
    return Guess(Mode.RESTART, f"{file.name} does not call {OWN_PACKAGE}.{OPENS_A_SESSION}")


def opens_a_session(source: bytes) -> bool:
    """Whether the program's text names our `init_process_group`. Raises SyntaxError, ValueError."""
    if OWN_PACKAGE.encode() not in source:
        return False
    tree = ast.parse(source)
    modules: set[str] = set()  # names that stand for our package or a module of it
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if _is_ours(alias.name):
                    modules.add(alias.asname or alias.name)
        elif isinstance(node, ast.ImportFrom) and node.module and _is_ours(node.module):
            for alias in node.names:
                if alias.name in (OPENS_A_SESSION, "*"):
                    return True
                modules.add(alias.asname or alias.name)  # `from bagua_core import torch_api`
    return any(
        isinstance(node, ast.Attribute) and node.attr == OPENS_A_SESSION and _dotted(node.value) in modules
        for node in ast.walk(tree)
    )


def _is_ours(module: str) -> bool:
    return module == OWN_PACKAGE or module.startswith(OWN_PACKAGE + ".")


def _dotted(node: ast.expr) -> str:
    """a.b.c as text; empty for anything else."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (base := _dotted(node.value)):
        return f"{base}.{node.attr}"
    return ""


def _module_file(name: str, directories: Iterable[Path]) -> Path | None:
    """The file that `python -m name` would run, without importing its parents."""
    relative = Path(*name.split("."))
    for directory in directories:
        for candidate in (directory / relative / "__main__.py", (directory / relative).with_suffix(".py")):
            if candidate.is_file():
                return candidate
    return None
