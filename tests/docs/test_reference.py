"""docs/reference/ shows every public name with its docstring, and every option of every program with its help.

Public names are those in `__all__` of a module (public_names.py). Programs are those that pyproject.toml installs,
and each `python -m` of the packages that a page names.
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

from bagua_agent.service.main import cli as agent_cli
from bagua_launch.main import cli as launch_cli
from bagua_launch.original_flags import Original, described
from tests.docs.page_blocks import PAGES, blocks
from tests.docs.public_names import FRAMEWORKS, listed_in_source, public_modules, sections, shown

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("name", public_modules())
def test_each_public_name_of_a_module_is_shown(name: str) -> None:
    module, on_page = importlib.import_module(name), shown()
    for public in module.__all__:
        thing = getattr(module, public)
        places = [place for place, other in on_page if other == public and on_page[place, other] is thing]
        if isinstance(thing, ModuleType):
            assert hasattr(thing, "__all__"), (
                f"{thing.__name__} has no __all__, so its public names are unknown"
            )
        elif inspect.isclass(thing) or inspect.isroutine(thing):
            assert any(found is thing for found in on_page.values()), f"{name}.{public} has no section"
            assert inspect.getdoc(thing), f"{name}.{public} has no docstring, so it is not shown"
        else:
            sources = [inspect.getsource(importlib.import_module(place)) for place in places]
            found = [source for source in sources if re.search(rf'^{public}\b.*\n"""', source, re.MULTILINE)]
            assert found, f"{name}.{public} has no section that shows its docstring"


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_each_public_name_of_a_framework_is_shown(name: str) -> None:
    on_page = sections()
    classes = {place.rpartition(".")[2] for place in on_page if place.rpartition(".")[0] == name}
    members = re.findall(r":members: (.+)", on_page.get(name, ""))
    assert classes | set(", ".join(members).split(", ") if members else []) == listed_in_source(name)


def test_members_of_shown_classes_have_docstrings() -> None:
    """autodoc leaves out those without; what overrides a member of a class of ours need not repeat its docstring."""
    without = []
    for (_, name), thing in shown().items():
        if not inspect.isclass(thing) or not thing.__module__.startswith("bagua_"):
            continue
        bases = [base for base in thing.__mro__ if base.__module__.startswith("bagua_")]
        for member, value in vars(thing).items():
            is_shown = isinstance(value, (property, classmethod, staticmethod)) or inspect.isfunction(value)
            if member.startswith("_") or not is_shown:
                continue
            if not any(inspect.getdoc(vars(base)[member]) for base in bases if member in vars(base)):
                without.append(f"{thing.__module__}.{name}.{member}")
    assert without == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_a_page_imports_is_shown(page: Path) -> None:
    on_page = list(shown().values())
    for block in blocks(page):
        nodes = ast.walk(ast.parse(block.text)) if block.language == "python" else []
        for node in nodes:
            if isinstance(node, ast.Import):
                modules = [alias.name for alias in node.names if alias.name.startswith("bagua_")]
                assert set(modules) <= set(public_modules()), f"{page}:{block.line}"
            elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("bagua_"):
                assert node.module
                for alias in node.names:
                    place = f"{page}:{block.line}: {node.module}.{alias.name}"
                    if node.module in FRAMEWORKS:
                        assert alias.name in listed_in_source(node.module), place
                        continue
                    thing = getattr(importlib.import_module(node.module), alias.name)
                    is_public = isinstance(thing, ModuleType) and hasattr(thing, "__all__")
                    assert is_public or any(found is thing for found in on_page), place


def test_what_is_shown_exists() -> None:
    for place in sections():
        if place.startswith(FRAMEWORKS):
            continue
        assert importlib.import_module(place).__doc__, place


def test_the_site_shows_the_arguments_that_constructors_describe() -> None:
    assert 'autoclass_content = "both"' in (ROOT / "docs/conf.py").read_text()


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
