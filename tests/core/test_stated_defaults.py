"""Each new tensor of the runtime's own states its dtype and its device: a script may have changed torch's defaults."""

from __future__ import annotations

import ast
from pathlib import Path

import torch
from torch.utils._device import _device_constructors

ROOT = Path(__file__).parents[2]
# where torch's default device counts; of these, a default dtype does not count for those in INTEGERS
FACTORIES = {function.__name__ for function in _device_constructors()}
INTEGERS = {"randint", "randperm", "tril_indices", "triu_indices"}


def unstated(source: str) -> list[tuple[int, str]]:
    """Calls of torch's factories that leave something to a default: line, and what they lack."""
    found = []
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Call(func=ast.Attribute(value=ast.Name("torch"), attr=name)) if name in FACTORIES:
                needed = {"device"} if name in INTEGERS else {"device", "dtype"}
                lacking = sorted(needed - {keyword.arg for keyword in node.keywords})
                found += [(node.lineno, f"torch.{name} without {'= and '.join(lacking)}=")] if lacking else []
    return found


def test_every_new_tensor_states_its_dtype_and_device() -> None:
    files = sorted((ROOT / "bagua_core").rglob("*.py"))
    calls = {str(file.relative_to(ROOT)): unstated(file.read_text()) for file in files}
    found = [f"{file}:{line}: {what}" for file, lines in calls.items() for line, what in lines]
    assert not found, "say dtype= and device=, for a script may have changed the defaults:\n" + "\n".join(
        found
    )


def test_what_is_found() -> None:
    source = "torch.zeros(3, dtype=a)\ntorch.randperm(3, device=b)\ntorch.tensor(0.0)\ntorch.zeros_like(x)"
    lacking = [(1, "torch.zeros without device="), (3, "torch.tensor without device= and dtype=")]
    assert unstated(source) == lacking
    assert {"zeros", "empty", "tensor", "arange", "randperm", "full"} <= FACTORIES, torch.__version__
