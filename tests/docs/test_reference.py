"""docs/reference/api.md shows every public name: each in `__all__` of a public module, with its docstring."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from pathlib import Path
from types import ModuleType

import pytest

import bagua_core as bagua

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


def test_what_is_shown_exists() -> None:
    for place in sections():
        if place.startswith(FRAMEWORKS):
            continue
        assert importlib.import_module(place).__doc__, place
