"""What integrations raise to users is of the core's tree: the only exceptions that they define never leave them."""

from __future__ import annotations

import ast
from pathlib import Path

import bagua_core.integrations

CONTROL_FLOW = {"StepAgain"}


def test_integrations_define_no_error() -> None:
    root = Path(bagua_core.integrations.__path__[0])
    classes = [
        node
        for path in sorted(root.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef)
    ]
    assert len(classes) > 5
    raised = {
        node.name
        for node in classes
        if any(ast.unparse(base).endswith(("Error", "Exception", "Violation", "Lost")) for base in node.bases)
    }
    assert raised == CONTROL_FLOW
