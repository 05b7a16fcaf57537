"""docs/reference/ shows every public name with its docstring, and every option of every program with its help.

Public names are those in `__all__` of a public module. Programs are those that pyproject.toml installs, and each
`python -m` of the packages that a page names.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import importlib.util
import inspect
import re
import tomllib
from pathlib import Path
from types import ModuleType

import click
import pytest

import bagua_core as bagua
from bagua_agent.service.main import cli as agent_cli
from bagua_launch.main import cli as launch_cli
from bagua_launch.original_flags import Original, described
from tests.docs.page_blocks import PAGES

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/reference/api.md"
DIRECTIVE = re.compile(r"^\.\. auto(module|class):: ([\w.]+)\n((?:   :.*\n)*)", re.MULTILINE)
IMPORTED = ("bagua_core", "bagua_core.algorithms", "bagua_core.torch_api")
# Frameworks take seconds to import, so what they offer is read from the source.
FRAMEWORKS = ("bagua_core.integrations.lightning", "bagua_core.integrations.huggingface")
# Of the original's modules whose names are in bagua_core.torch_api too, or that hold what no script calls.
WITHOUT_SECTION = {"communication", "checkpoint", "data_parallel", "moe", "utils"}


def sections() -> dict[str, str]:
    """The options of each directive, by the module or class that it shows."""
    return {found[2]: found[3] for found in DIRECTIVE.finditer(PAGE.read_text())}


def listed_in_source(module: str) -> set[str]:
    """`__all__` of a module that is not imported."""
    tree = ast.parse((ROOT / module.replace(".", "/") / "__init__.py").read_text())
    (value,) = (
        node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__"
    )
    return set(ast.literal_eval(value))


@pytest.mark.parametrize("name", IMPORTED)
def test_each_public_name_of_a_module_is_shown(name: str) -> None:
    """automodule without a list takes `__all__`, and leaves out modules and what has no docstring."""
    module, shown = importlib.import_module(name), sections()
    assert re.search(r":members:\n", shown[name]) and ":imported-members:" in shown[name]
    excluded = set(", ".join(re.findall(r":exclude-members: (.+)", shown[name])).split(", ")) - {""}
    assert all(getattr(module, of_both) is getattr(bagua, of_both) for of_both in excluded), "shown above"
    for public in module.__all__:
        thing = getattr(module, public)
        if isinstance(thing, ModuleType):
            assert public in WITHOUT_SECTION or f"{name}.{public}" in shown, f"{public} has no section"
        elif inspect.isclass(thing) or inspect.isroutine(thing):
            assert inspect.getdoc(thing), f"{name}.{public} has no docstring, so it is not shown"
        else:
            assert re.search(rf'^{public}\b.*\n"""', inspect.getsource(module), re.MULTILINE), public


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_each_public_name_of_a_framework_is_shown(name: str) -> None:
    shown = sections()
    classes = {place.rpartition(".")[2] for place in shown if place.rpartition(".")[0] == name}
    members = re.findall(r":members: (.+)", shown.get(name, ""))
    assert classes | set(", ".join(members).split(", ") if members else []) == listed_in_source(name)


def test_what_the_worked_examples_import_is_shown() -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "CONTRIBUTING.md").read_text(), re.DOTALL)
    imported = [
        found for block in blocks for found in re.findall(r"^from (bagua_core\S*) import (.+)$", block, re.M)
    ]
    assert len(imported) > 3
    shown = sections()
    for module, names in imported:
        assert module in shown, f"{module} has no section"
        listed = re.search(r":members:(.*)", shown[module])
        assert listed, module
        of_module = set(listed[1].strip().split(", ")) - {""} or set(importlib.import_module(module).__all__)
        assert set(names.split(", ")) <= of_module, module


def test_what_is_shown_exists() -> None:
    for place in sections():
        if place.startswith(FRAMEWORKS):
            continue
        assert importlib.import_module(place).__doc__, place


COMMANDS = (ROOT / "docs/reference/commands.md").read_text()
WITHOUT_OPTIONS = {"bagua_core.kernels.build"}
# With the reason, or the command that they are other names of
HIDDEN = {
    "--failpoints": "for tests",
    "list": "status",
    "ps": "status",
}
ORIGINAL = {f"python -m {kind.value}" if "." in kind.value else kind.value: kind for kind in Original}

_spec = importlib.util.spec_from_file_location("program_help", ROOT / "docs/program_help.py")
assert _spec and _spec.loader
program_help = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(program_help)


def shown_programs() -> dict[str, str]:
    """By program, the place in which the page finds its help; empty for one without options."""
    found = re.findall(
        r"^## (?:Options of )?(\S.*)\n(?:(?!^## ).*\n)*?\.\. (?:click|program-help):: (\S+)\n",
        COMMANDS,
        re.MULTILINE,
    )
    return {**dict.fromkeys(re.findall(r"^## (python -m .+)$", COMMANDS, re.MULTILINE), ""), **dict(found)}


def test_every_program_that_users_are_pointed_to_is_shown() -> None:
    installed = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    named = {
        f"python -m {m}" for p in PAGES for m in re.findall(r"python -m (bagua_\w+[\w.]*\w)", p.read_text())
    }
    shown = shown_programs()
    assert named | set(installed) == set(shown)
    assert {
        program.removeprefix("python -m ") for program, place in shown.items() if not place
    } == WITHOUT_OPTIONS
    for module in WITHOUT_OPTIONS:
        path = importlib.util.find_spec(module)
        assert path and path.origin and "argv" not in Path(path.origin).read_text(), f"{module} takes words"


@pytest.mark.parametrize("group", [launch_cli, agent_cli], ids=["bagua-launch", "bagua-agent"])
def test_every_option_of_clicks_programs_has_a_help(group: click.Group) -> None:
    """sphinx-click shows each command, and each option that is not hidden."""
    program = "bagua-launch" if group is launch_cli else "bagua-agent"
    assert re.search(rf":prog: {program}\n   :nested: full\n", COMMANDS)
    for name, command in group.commands.items():
        assert command.hidden == (name in HIDDEN) and command.get_short_help_str(), name
        for option in command.params:
            if isinstance(option, click.Option):
                assert option.hidden == (option.opts[0] in HIDDEN), option.opts
                assert option.hidden or option.help, f"{name} {option.opts[0]}"


def test_every_option_of_other_programs_is_shown_with_its_help() -> None:
    checked = 0
    for program, place in shown_programs().items():
        module, _, name = place.partition(":")
        made = (
            None
            if program in ("bagua-launch", "bagua-agent") or not place
            else getattr(importlib.import_module(module), name)()
        )
        if isinstance(made, argparse.ArgumentParser):
            actions = {
                "/".join(action.option_strings) or str(action.metavar or action.dest): action
                for parser in program_help.parsers(made)
                for action in parser._actions
            }
            wanted = {
                spelled: action.help
                for spelled, action in actions.items()
                if not isinstance(action, argparse._SubParsersAction)
            }
        elif made is not None:
            wanted = dict(described(ORIGINAL[program]))
        else:
            continue
        text = " ".join(" ".join(program_help.help_texts(place)).split())
        for spelled, said in wanted.items():
            assert said, f"{program}: {spelled} has no help"
            assert spelled.partition("/")[0] in text and " ".join(said.split()) in text, (
                f"{program}: {spelled}"
            )
            checked += 1
    assert checked > 20
