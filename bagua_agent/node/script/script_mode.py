"""Guesses whether a script's workers follow a new generation in process or by a new start.

Reads the program's text without running it: a script that calls `init_process_group` of `bagua_core` follows in
process, any other does not know this runtime and is restarted. Only a guess: a worker that opens a session nevertheless
makes its job LIVE (see membership/state_machine/picture.py), so a wrong guess costs only a later start.
"""

from __future__ import annotations

import ast
import logging
from collections.abc import Iterable
from dataclasses import dataclass, fields
from enum import Enum
from pathlib import Path

from bagua_agent.config.job_config import JobConfig, WorkerCommand
from bagua_agent.node.script.script_text import NoScriptText, read_script

OWN_PACKAGE = "bagua_core"
OPENS_A_SESSION = "init_process_group"  # torch's function has the same name
TORCH_DISTRIBUTED = "torch.distributed"

# JobConfig's field: option
_OF_STEPS = {
    "checkpoint_dir": "--checkpoint-dir",
    "ledger_dir": "--ledger",
    "digest_every_steps": "--digest-every",
    "hang_timeout_s": "--hang-timeout",
    "autotune_level": "--autotune-level",
}

log = logging.getLogger(__name__)


class Mode(Enum):
    """The mode of a job, under the names that JobSpec.Mode has: protobuf is not loaded before workers are started."""

    LIVE = "LIVE"
    RESTART = "RESTART"


@dataclass(frozen=True, slots=True)
class Guess:
    """The guessed mode of a job and the reason for it. names_bagua: the program's text names a package of Bagua, or is
    not known; without it only a module that the program imports can open a session."""

    mode: Mode
    reason: str
    names_bagua: bool = True


def guess_mode(command: WorkerCommand, directory: Path, search_path: Iterable[str] | None = None) -> Guess:
    """Guesses the mode of the workers that `command` runs. directory: where the command runs. search_path: where
    modules are looked for; None: this interpreter's."""
    try:
        script = read_script(command, directory, search_path)
    except NoScriptText as why:
        if why.is_unusable:
            log.warning(
                "%s; its workers begin as a script's of torchrun, and follow in process once one has called %s.%s",
                why,
                OWN_PACKAGE,
                OPENS_A_SESSION,
            )
        return Guess(Mode.RESTART, str(why))
    try:
        opens = opens_a_session(script.source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        # not Python source (a zip file, compiled code), or broken: running it says so
        return Guess(Mode.RESTART, f"{script.name} can't be parsed")
    if opens:
        return Guess(Mode.LIVE, f"{script.name} calls {OWN_PACKAGE}.{OPENS_A_SESSION}")
    reason = f"{script.name} does not call {OWN_PACKAGE}.{OPENS_A_SESSION}"
    return Guess(Mode.RESTART, reason, names_bagua=b"bagua" in script.source)


def options_of_steps(config: JobConfig) -> list[str]:
    """Returns the given options that concern steps, which are not observed in restart mode."""
    default = {field.name: field.default for field in fields(JobConfig)}
    return [flag for name, flag in _OF_STEPS.items() if getattr(config, name) != default[name]]


def makes_torch_group(
    command: WorkerCommand, directory: Path, search_path: Iterable[str] | None = None
) -> bool:
    """Tells whether the script's own text makes torch's default process group, as scripts of torchrun do. Arguments as
    those of guess_mode."""
    try:
        return calls(read_script(command, directory, search_path).source, TORCH_DISTRIBUTED)
    except (NoScriptText, SyntaxError, ValueError, RecursionError, MemoryError):
        return False  # running it shows what it is


def opens_a_session(source: bytes) -> bool:
    """Tells whether the program's text names our `init_process_group`. Raises SyntaxError, ValueError."""
    return calls(source, OWN_PACKAGE)


def calls(source: bytes, package: str) -> bool:
    """Tells whether the program's text names `init_process_group` of `package` or of a module in it. Raises
    SyntaxError, ValueError."""
    if any(name.encode() not in source for name in (package.rpartition(".")[2], OPENS_A_SESSION)):
        return False
    tree = ast.parse(source)
    parent, _, last = package.rpartition(".")
    modules: set[str] = set()  # names that stand for the package or a module of it
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if _is_in(alias.name, package):
                    modules.add(alias.asname or alias.name)
                elif parent and alias.name == parent:  # `import torch`, then torch.distributed
                    modules.add(f"{alias.asname or alias.name}.{last}")
        elif isinstance(node, ast.ImportFrom) and node.module and _is_in(node.module, package):
            for alias in node.names:
                if alias.name in (OPENS_A_SESSION, "*"):
                    return True
                modules.add(alias.asname or alias.name)  # `from bagua_core import torch_api`
        elif isinstance(node, ast.ImportFrom) and parent and node.module == parent:
            modules.update(a.asname or a.name for a in node.names if a.name == last)
    return any(
        isinstance(node, ast.Attribute) and node.attr == OPENS_A_SESSION and _dotted(node.value) in modules
        for node in ast.walk(tree)
    )


def _is_in(module: str, package: str) -> bool:
    return module == package or module.startswith(package + ".")


def _dotted(node: ast.expr) -> str:
    """Returns a.b.c as text; empty for anything else."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (base := _dotted(node.value)):
        return f"{base}.{node.attr}"
    return ""
