"""Finds and reads the text of the program that a command runs, without running it. Bounded; opens no FIFO."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from bagua_agent.base.errors import UserError
from bagua_agent.config.job_config import CommandKind, WorkerCommand
from bagua_agent.workers.process.foreign_files import UnusableFile, read_ordinary

# The agent, which may be root, parses what a job's submitter wrote: so much takes it at most 1.5 s and 115 MB, and
# 1 MiB took 12 s and 920 MB. What people write by hand is smaller.
LARGEST_SCRIPT_BYTES = 128 << 10


@dataclass(frozen=True, slots=True)
class ScriptText:
    name: str  # of the file
    source: bytes


class NoScriptText(UserError):
    """Raised if the command runs no readable Python file; the message says why. is_unusable: there is one, and it is no
    ordinary file or too large."""

    def __init__(self, why: str, *, is_unusable: bool = False) -> None:
        super().__init__(why)
        self.is_unusable = is_unusable


def read_script(
    command: WorkerCommand, directory: Path, search_path: Iterable[str] | None = None
) -> ScriptText:
    """Reads the text of the program that `command` runs. directory: where the command runs. search_path: where modules
    are looked for; None: this interpreter's.

    Raises NoScriptText.
    """
    if command.kind is CommandKind.EXECUTABLE:
        raise NoScriptText(f"{command.target} is an executable")
    if command.kind is CommandKind.MODULE:
        paths = [directory, *(Path(p) for p in (sys.path if search_path is None else search_path) if p)]
        found = _module_file(command.target, paths)
        if found is None:
            raise NoScriptText(f"module {command.target} was not found as a file")
        file = found
    else:
        file = directory / command.target
        try:
            if file.is_dir():
                file = file / "__main__.py"
        except OSError as error:  # its name is too long
            raise NoScriptText(f"{command.target[:40]!r} can't be looked at ({error.strerror})") from error
    try:
        return ScriptText(file.name, read_ordinary(file, LARGEST_SCRIPT_BYTES, follow_links=True))
    except UnusableFile as error:
        raise NoScriptText(f"{file.name!r} can't be read ({error.strerror})", is_unusable=True) from error
    except (OSError, ValueError) as error:  # ValueError: its name holds a NUL
        raise NoScriptText(f"{file.name!r} can't be read ({getattr(error, 'strerror', error)})") from error


def _module_file(name: str, directories: Iterable[Path]) -> Path | None:
    """Returns the file that `python -m name` would run, without importing its parents."""
    relative = Path(*name.split("."))
    for directory in directories:
        for candidate in (directory / relative / "__main__.py", (directory / relative).with_suffix(".py")):
            if candidate.is_file():
                return candidate
    return None
