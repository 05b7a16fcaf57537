"""Decides from an optimizer's source whether its step() calls the closure exactly once, before it does anything else.

Every rank must come to the same answer without a message, so the answer follows from the class alone. It is True only
for the usual form, one call outside loops, with no loop and no call of a method of its own before it: SAM moves the
parameters first. A class whose source cannot be read is taken to call the closure again.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch

_known: dict[type, bool] = {}
_ATTEMPTS = 20


def calls_closure_once(kind: type[torch.optim.Optimizer]) -> bool:
    """Tells whether step() of `kind` calls its closure exactly once, before anything else; see the module. kind: a
    class whose step() takes a closure as its first argument."""
    if kind not in _known:
        _known[kind] = _once(kind, kind.__mro__)
    return _known[kind]


def _once(kind: type, ancestors: tuple[type, ...]) -> bool:
    """Tells whether the first step() found in `ancestors`, in this order, calls its closure once."""
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
    """Parses `source`. CPython 3.11 may raise SystemError while another thread parses, so this tries again then."""
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
    own, closure = arguments[0].arg, arguments[1].arg
    calls = 0
    for path in _uses(definition, closure):
        node, parent = path[-1], path[-2]
        if _is_test(node, path):
            continue
        if any(isinstance(above, (ast.For, ast.While, ast.FunctionDef, ast.Lambda)) for above in path[1:]):
            return False
        is_call = isinstance(parent, ast.Call) and parent.func is node
        if _is_wrapped_anew(path, closure):
            continue
        if not is_call and not (_is_super_step(path) and _once(kind, others)):
            return False
        if any(_may_change_parameters(statement, own) for statement in _statements_before(path)):
            return False
        calls += 1
    return calls <= 1


def _uses(tree: ast.AST, name: str, path: tuple[ast.AST, ...] = ()) -> Iterator[tuple[ast.AST, ...]]:
    """Yields, for each place where `name` is read, the nodes from the root to it."""
    path = (*path, tree)
    if isinstance(tree, ast.Name) and tree.id == name and isinstance(tree.ctx, ast.Load):
        yield path
    for child in ast.iter_child_nodes(tree):
        yield from _uses(child, name, path)


def _statements_before(path: tuple[ast.AST, ...]) -> Iterator[ast.stmt]:
    """Yields the statements that run before the node at the end of `path`, in the blocks that it lies in."""
    for block, inside in pairwise(path):
        for statements in (getattr(block, name, ()) for name in ("body", "orelse", "finalbody")):
            if isinstance(statements, list) and inside in statements:
                yield from statements[: statements.index(inside)]


def _may_change_parameters(statement: ast.stmt, own: str) -> bool:
    """Tells whether the statement has a loop, or calls a method of the optimizer. own: the name of the optimizer
    itself."""
    return any(
        isinstance(node, (ast.For, ast.While))
        or (isinstance(node, ast.Call) and _is_own_method(node.func, own) and not _is_check(node))
        for node in ast.walk(statement)
    )


def _is_own_method(function: ast.AST, own: str) -> bool:
    """Tells whether the function is `self.first_step` or `super().first_step`, but not `self.defaults.get`."""
    if not isinstance(function, ast.Attribute):
        return False
    of = function.value
    is_super = isinstance(of, ast.Call) and isinstance(of.func, ast.Name) and of.func.id == "super"
    return is_super or (isinstance(of, ast.Name) and of.id == own)


def _is_check(call: ast.Call) -> bool:
    """Tells whether the call is torch's own check, with which many steps begin."""
    return isinstance(call.func, ast.Attribute) and call.func.attr.endswith("_graph_capture_health_check")


def _is_test(node: ast.AST, path: tuple[ast.AST, ...]) -> bool:
    """Tells whether the node is tested by `if closure`, `closure is not None` and the like."""
    parent = path[-2]
    if isinstance(parent, ast.Compare):
        return True
    return isinstance(parent, (ast.If, ast.IfExp, ast.Assert)) and parent.test is node


def _is_wrapped_anew(path: tuple[ast.AST, ...], closure: str) -> bool:
    """Tells whether the closure is used as in `closure = torch.enable_grad()(closure)`."""
    call, assignment = path[-2], path[-3]
    return (
        isinstance(call, ast.Call)
        and isinstance(assignment, ast.Assign)
        and [target.id for target in assignment.targets if isinstance(target, ast.Name)] == [closure]
    )


def _is_super_step(path: tuple[ast.AST, ...]) -> bool:
    """Tells whether the closure is used as in `super().step(closure)`, also as a keyword."""
    call = path[-3] if isinstance(path[-2], ast.keyword) else path[-2]
    if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr == "step"):
        return False
    of = call.func.value
    return isinstance(of, ast.Call) and isinstance(of.func, ast.Name) and of.func.id == "super"
