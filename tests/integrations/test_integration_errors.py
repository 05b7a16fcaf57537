"""Errors of integrations are of the core's tree. Read from their text: importing them imports their frameworks."""

from __future__ import annotations

import ast
from pathlib import Path

import bagua_core.integrations

KINDS = {"UserError", "PeerViolation", "InfrastructureLost", "InternalError"}
NEVER_LEAVES = {"StepAgain"}  # its module catches it


def test_each_is_of_one_kind() -> None:
    root = Path(bagua_core.integrations.__path__[0])
    bases = {
        node.name: {ast.unparse(base) for base in node.bases}
        for path in sorted(root.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef)
    }
    of_kinds = {name for name, of in bases.items() if len(of & KINDS) == 1}
    plain = {
        name for name, of in bases.items() if any(b.endswith(("Error", "Exception")) for b in of - KINDS)
    }
    assert of_kinds
    assert plain - of_kinds == NEVER_LEAVES
