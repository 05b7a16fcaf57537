"""Finds out from a script's text whether it sets library variables before it imports torch. Pure, but it reads.

Such a script gets an interpreter of its own instead of a fork that has torch loaded. The text is a first check: if a
helper module sets the variable, bagua_core/worker/fresh_start.py notices it when the script imports torch.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import TypeGuard

from bagua_agent.config.job_config import WorkerCommand
from bagua_agent.node.script.script_text import NoScriptText, read_script
from bagua_agent.workers.start.library_variables import is_read_at_load

_BRING_TORCH = ("torch", "bagua_core")
_CHANGES = ("update", "setdefault", "pop", "clear")
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)


def why_a_fresh_interpreter(command: WorkerCommand, directory: Path) -> str | None:
    """Returns one line for the log; None if the script's text shows no need. directory: where the command runs."""
    try:
        script = read_script(command, directory)
        variable = set_before_torch(script.source)
    except (NoScriptText, SyntaxError, ValueError, RecursionError, MemoryError):
        return None  # running it says what is wrong
    return f"{script.name} sets {variable} before it imports torch" if variable else None


def set_before_torch(source: bytes) -> str:
    """Returns the first variable set in front of the first import of torch, or anywhere if the text does not import it;
    "" if there is none.

    Raises SyntaxError, ValueError.
    """
    if not any(word in source for word in (b"environ", b"putenv", b"unsetenv")):
        return ""
    tree = ast.parse(source)
    imports = min((n.lineno for n in _outside_functions(tree) if _imports_torch(n)), default=None)
    environ = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module == "os"
        for alias in node.names
        if alias.name == "environ"
    }
    changes = sorted((line, name) for n in ast.walk(tree) for line, name in _changes(n, environ))
    early = (name for line, name in changes if imports is None or line < imports)
    return next((name or "a variable" for name in early if not name or is_read_at_load(name)), "")


def _outside_functions(tree: ast.AST) -> Iterator[ast.AST]:
    for node in ast.iter_child_nodes(tree):
        yield node
        if not isinstance(node, _FUNCTIONS):
            yield from _outside_functions(node)


def _imports_torch(node: ast.AST) -> TypeGuard[ast.stmt]:
    if isinstance(node, ast.Import):
        return any(alias.name.partition(".")[0] in _BRING_TORCH for alias in node.names)
    return isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in _BRING_TORCH


def _changes(node: ast.AST, environ: set[str]) -> Iterator[tuple[int, str]]:
    """Returns (line, variable) of each change that the node makes; "" for a variable that the text does not name."""

    def is_environ(value: ast.expr) -> bool:
        return (isinstance(value, ast.Attribute) and value.attr == "environ") or (
            isinstance(value, ast.Name) and value.id in environ
        )

    if isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load) and is_environ(node.value):
        yield node.lineno, _text(node.slice)
    elif isinstance(node, ast.AugAssign) and is_environ(node.target):
        yield node.lineno, ""
    elif isinstance(node, ast.Call):
        called = node.func
        if isinstance(called, ast.Attribute) and called.attr in _CHANGES and is_environ(called.value):
            for name in _given(node):
                yield node.lineno, name
        elif getattr(called, "attr", getattr(called, "id", "")) in ("putenv", "unsetenv"):
            yield node.lineno, _text(node.args[0]) if node.args else ""


def _given(call: ast.Call) -> list[str]:
    """Returns the names in the arguments of `update` and the like; "" for what the text does not name."""
    names = [keyword.arg or "" for keyword in call.keywords]
    first = call.args[0] if call.args else None
    if isinstance(first, ast.Dict):
        names += ["" if key is None else _text(key) for key in first.keys]
    elif first is not None:
        names.append(_text(first))
    return names or [""]


def _text(expression: ast.expr) -> str:
    if isinstance(expression, ast.Constant) and isinstance(expression.value, str):
        return expression.value
    return ""
