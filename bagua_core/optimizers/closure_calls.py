"""Decides from an optimizer's source whether its step() calls the closure exactly once.

Every rank must come to the same answer without a message, so the answer follows from the class alone. It is True only
for the usual form, one call outside loops. A class whose source cannot be read is taken to call the closure again.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator
from typing import Any

import torch

_known: dict[type, bool] = {}
_ATTEMPTS = 20


def calls_closure_once(kind: type[torch.optim.Optimizer]) -> bool:
    """kind: a class whose step() takes a closure as its first argument."""
    if kind not in _known:
        _known[kind] = _once(kind, kind.__mro__)
    return _known[kind]


def _once(kind: type, ancestors: tuple[type, ...]) -> bool:
    """ancestors: where to look for step(), in this order."""
    for place, owner in enumerate(ancestors):
        if "step" in vars(owner):
            definition = _definition(inspect.unwrap(vars(owner)["step"]))
            return definition is not None and _uses_are_one_call(definition, kind, ancestors[place + 1 :])
    return False


def _definition(step: Any) -> ast.FunctionDef | None:
    try:
        tree = _parsed(textwrap.dedent(inspect.getsource(step)))
    except (OSError, TypeError, SyntaxError):
        return None
    found = tree.body[0]
    return found if isinstance(found, ast.FunctionDef) else None


def _parsed(source: str) -> ast.Module:
    """ast.parse, which on CPython 3.11 may raise SystemError while another thread is within it."""
    for _ in range(_ATTEMPTS - 1):
        try:
            return ast.parse(source)
        except SystemError:
            continue
    return ast.parse(source)


def _uses_are_one_call(definition: ast.FunctionDef, kind: type, others: tuple[type, ...]) -> bool:
    arguments = [*definition.args.posonlyargs, *definition.args.args]
    if len(arguments) < 2:
        return False
    closure = arguments[1].arg
    calls = 0
    for path in _uses(definition, closure):
        node, parent = path[-1], path[-2]
        if _is_test(node, path):
            continue
        if any(isinstance(above, (ast.For, ast.While, ast.FunctionDef, ast.Lambda)) for above in path[1:]):
            return False
        if isinstance(parent, ast.Call) and parent.func is node:
            calls += 1
        elif _is_wrapped_anew(path, closure):
            continue
        elif _is_super_step(path) and _once(kind, others):
            calls += 1
        else:
            return False
    return calls <= 1


def _uses(tree: ast.AST, name: str, path: tuple[ast.AST, ...] = ()) -> Iterator[tuple[ast.AST, ...]]:
    """For each place where `name` is read, the nodes from the root to it."""
    path = (*path, tree)
    if isinstance(tree, ast.Name) and tree.id == name and isinstance(tree.ctx, ast.Load):
        yield path
    for child in ast.iter_child_nodes(tree):
        yield from _uses(child, name, path)


def _is_test(node: ast.AST, path: tuple[ast.AST, ...]) -> bool:
    """`if closure`, `closure is not None` and the like."""
    parent = path[-2]
    if isinstance(parent, ast.Compare):
        return True
    return isinstance(parent, (ast.If, ast.IfExp, ast.Assert)) and parent.test is node


def _is_wrapped_anew(path: tuple[ast.AST, ...], closure: str) -> bool:
    """`closure = torch.enable_grad()(closure)`"""
    call, assignment = path[-2], path[-3]
    return (
        isinstance(call, ast.Call)
        and isinstance(assignment, ast.Assign)
        and [target.id for target in assignment.targets if isinstance(target, ast.Name)] == [closure]
    )


def _is_super_step(path: tuple[ast.AST, ...]) -> bool:
    """`super().step(closure)`, also as a keyword"""
    call = path[-3] if isinstance(path[-2], ast.keyword) else path[-2]
    if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr == "step"):
        return False
    of = call.func.value
    return isinstance(of, ast.Call) and isinstance(of.func, ast.Name) and of.func.id == "super"
