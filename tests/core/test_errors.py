"""Every exception of the core has its place in one tree, which says who must act."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path

import pytest

import bagua_core
from bagua_core.errors import (
    BaguaError,
    InfrastructureLost,
    InternalError,
    LeaveInterrupt,
    PeerViolation,
    UserError,
)
from bagua_core.kernels.compilation import CompilationError

KINDS = (UserError, PeerViolation, InfrastructureLost, InternalError)
ROOT = Path(bagua_core.__file__).parent


def exceptions() -> Iterator[type[BaseException]]:
    """Of all modules that define a class whose name or bases look like one."""
    for path in sorted(ROOT.rglob("*.py")):
        classes = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ClassDef)]
        if (
            not any(node.bases for node in classes)
            or path.name == "__main__.py"
            or path.parent.name == "worker"
        ):
            continue
        name = ".".join(("bagua_core", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(
            ".__init__"
        )
        module = importlib.import_module(name)
        for node in classes:
            found = vars(module).get(node.name)
            if isinstance(found, type) and issubclass(found, BaseException) and found.__module__ == name:
                yield found


# The first is no error. The second is of a module that setup.py loads without the package.
OUTSIDE = (LeaveInterrupt, CompilationError)
FOUND = [kind for kind in exceptions() if kind not in OUTSIDE]


def test_there_are_some() -> None:
    assert len(FOUND) > 50


@pytest.mark.parametrize("found", FOUND, ids=lambda kind: kind.__name__)
def test_each_is_in_the_tree_and_of_one_kind_at_most(found: type[BaseException]) -> None:
    assert issubclass(found, BaguaError), f"{found.__module__}.{found.__name__}"
    assert sum(issubclass(found, kind) for kind in KINDS) <= 1
