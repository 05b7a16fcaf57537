"""Finds the public names of the packages, and which of them docs/reference/api.md shows.

Public names are those in `__all__` of a module. The page's directives are autodoc's: automodule without a list takes
`__all__`, or what the module defines, and leaves out what has no docstring.
"""

from __future__ import annotations

import ast
import importlib
import re
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/reference/api.md"
DIRECTIVE = re.compile(r"^\.\. auto(module|class):: ([\w.]+)\n((?:   :.*\n)*)", re.MULTILINE)
PACKAGES = (ROOT / "bagua_core", ROOT / "protos/bagua_contract")
# Frameworks take seconds to import, so what they offer is read from the source.
FRAMEWORKS = ("bagua_core.integrations.lightning", "bagua_core.integrations.huggingface")


def public_modules() -> list[str]:
    """Every module with `__all__` that is not a framework's, by name."""
    found = []
    for package in PACKAGES:
        for path in package.rglob("*.py"):
            if re.search(r"^__all__ = ", path.read_text(), re.MULTILINE):
                parts = path.relative_to(package.parent).with_suffix("").parts
                found.append(".".join(parts).removesuffix(".__init__"))
    return sorted(set(found) - set(FRAMEWORKS))


def listed_in_source(module: str) -> set[str]:
    """`__all__` of a package that is not imported."""
    tree = ast.parse((ROOT / module.replace(".", "/") / "__init__.py").read_text())
    (value,) = (
        node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__"
    )
    return set(ast.literal_eval(value))


def sections() -> dict[str, str]:
    """The options of each directive, by the module or class that it shows."""
    return {found[2]: found[3] for found in DIRECTIVE.finditer(PAGE.read_text())}


def shown_by(module: ModuleType, options: str) -> set[str]:
    """The names of `module` that a directive with these options shows, where they have docstrings."""
    listed = re.search(r":members: (.+)", options)
    if listed:
        return set(listed[1].split(", "))
    own = {
        name for name, thing in vars(module).items() if getattr(thing, "__module__", None) == module.__name__
    }
    names = set(getattr(module, "__all__", [name for name in own if not name.startswith("_")]))
    if ":imported-members:" not in options:
        names = {name for name in names if name in own or not hasattr(getattr(module, name), "__module__")}
    excluded = re.search(r":exclude-members: (.+)", options)
    return names - (set(excluded[1].split(", ")) if excluded else set())


def shown() -> dict[tuple[str, str], object]:
    """What the page shows, but for frameworks, by module and name."""
    found: dict[tuple[str, str], object] = {}
    for place, options in sections().items():
        if not place.startswith(FRAMEWORKS):
            module = importlib.import_module(place)
            found |= {(place, name): getattr(module, name) for name in sorted(shown_by(module, options))}
    return found
