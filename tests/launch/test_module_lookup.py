"""`--module` accepts what the interpreter can import, also by finders that installations in editable form add."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

import pytest

from bagua_agent.config.job_config import CommandKind, WorkerCommand
from bagua_launch.errors import RequestError
from bagua_launch.input_files import check_command


class Finder:
    """As pip installs one for a package in editable form. Imports nothing."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return ModuleSpec(name, None) if name == "only_by_a_finder" else None


def command(module: str) -> WorkerCommand:
    return WorkerCommand(CommandKind.MODULE, module)


def test_a_module_of_a_finder_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RequestError, match="no module 'only_by_a_finder'"):
        check_command(command("only_by_a_finder.train"))
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, Finder()])
    check_command(command("only_by_a_finder.train"))


def test_a_module_that_no_finder_knows_is_refused() -> None:
    with pytest.raises(RequestError, match="no module 'absent_everywhere'"):
        check_command(command("absent_everywhere"))
