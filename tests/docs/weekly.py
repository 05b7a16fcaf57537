"""Finds which tests use a text of their code, and which of those run only with `scripts/test --long`, once a week.

A test is one of those if it is long or names a package that is installed only then. Code is read and not run: a text
inside a helper belongs to the tests of the file that use the helper, directly or through others; a text at the top of a
file belongs to the tests that use its name.
"""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path

from tests import long_tests
from tests.docs.page_blocks import ROOT

DISTRIBUTIONS = {"mlflow": "mlflow-skinny"}  # whose name is not that of its module
Definition = ast.FunctionDef | ast.ClassDef | ast.Assign | ast.AnnAssign
Match = Callable[[ast.AST], bool]


def functions_that_use(test: Path, matches: Match) -> list[str]:
    """The names of the test functions of the file `test` that use a node for which `matches` holds."""
    definitions = [node for node in _tree(test).body if isinstance(node, Definition)]
    found = [node for node in definitions if any(map(matches, ast.walk(node)))]
    for used in found:  # grows: those that use what was found
        names = _defined(used)
        found += [node for node in definitions if node not in found and names & _used(node)]
    return [
        node.name for node in found if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    ]


def is_weekly(test: Path, name: str, of: Match | None = None) -> bool:
    """Whether each form of a test function is weekly; if `of` holds for values of parameters, each form of these."""
    (node,) = (n for n in _tree(test).body if isinstance(n, ast.FunctionDef) and n.name == name)
    marks = [ast.unparse(mark) for mark in node.decorator_list]
    if "pytest.mark.long" in marks or "pytestmark = pytest.mark.long" in map(ast.unparse, _tree(test).body):
        return True
    texts = [n.value for n in ast.walk(node) if isinstance(n, ast.Constant) and isinstance(n.value, str)]
    if {distribution(text) for text in texts if text.isidentifier()} & packages_of_long_runs():
        return True
    start = f"{test.relative_to(ROOT)}::{name}"
    forms = [one for one in long_tests.listed() if one == start or one.startswith(f"{start}[")]
    values = [n for mark in node.decorator_list for n in ast.walk(mark) if of is not None and of(n)]
    if values:
        ids = {part for one in forms for part in re.split(r"[\[\]-]", one)}
        return all(isinstance(value, ast.Constant) and value.value in ids for value in values)
    return len(forms) + sum(mark.count("pytest.mark.long") for mark in marks) >= _forms(node)


@cache
def packages_of_long_runs() -> set[str]:
    """Those that scripts/test installs only with --long."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    script = (ROOT / "scripts/test").read_text()
    usual, long = (
        {re.split(r"[\[>;]", package)[0] for extra in names.split(",") for package in extras[extra]}
        for names in re.findall(r"^(?:extras=|.*extras\+=,)([\w,]+)", script, re.MULTILINE)
    )
    return long - usual


def distribution(module: str) -> str:
    """The name of the package that has a module."""
    package = module.partition(".")[0]
    return DISTRIBUTIONS.get(package, package)


@cache
def _tree(test: Path) -> ast.Module:
    return ast.parse(test.read_text())


def _defined(node: Definition) -> set[str]:
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return {node.name}
    targets: Iterable[ast.AST] = node.targets if isinstance(node, ast.Assign) else [node.target]
    return {name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)}


def _used(node: Definition) -> set[str]:
    """The names in its code, and its arguments, which may be fixtures."""
    names = {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
    return names | {n.arg for n in ast.walk(node) if isinstance(n, ast.arg)}


def _forms(node: ast.FunctionDef) -> int:
    """How many tests a function is. Values that are not written out count as many."""
    number = 1
    for mark in node.decorator_list:
        if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "pytest.mark.parametrize":
            values = mark.args[1]
            number *= (
                len(values.elts) if isinstance(values, ast.List | ast.Tuple) else len(long_tests.listed())
            )
    return number
