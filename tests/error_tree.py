"""Finds every exception class of a package, to check its place in the package's tree of errors."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Collection, Iterator
from pathlib import Path
from types import ModuleType


def exceptions_of(package: ModuleType, without: Collection[str] = ()) -> Iterator[type[BaseException]]:
    """Those that the package's own modules define. without: names of folders that are not imported."""
    root = Path(package.__file__ or "").parent
    for path in sorted(root.rglob("*.py")):
        below = path.relative_to(root)
        classes = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ClassDef)]
        if not any(node.bases for node in classes):
            continue
        if path.name == "__main__.py" or not set(without).isdisjoint(below.parts):
            continue
        name = ".".join((package.__name__, *below.with_suffix("").parts)).removesuffix(".__init__")
        module = importlib.import_module(name)
        for node in classes:
            found = vars(module).get(node.name)
            if isinstance(found, type) and issubclass(found, BaseException) and found.__module__ == name:
                yield found
