from __future__ import annotations

import ast
from pathlib import Path

from bagua_contract import grpc_channel

ROOT = Path(__file__).parents[2]
PRODUCT = ("bagua_agent", "bagua_core", "bagua_launch", "bagua_torchrun", "protos/bagua_contract")


def opens_a_channel(source: str) -> bool:
    """Also by `from grpc import ...`, and of grpc.aio."""
    opened = {"insecure_channel", "secure_channel", "Channel"}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) in opened:
            return True
    return False


def test_every_channel_is_opened_without_retries() -> None:
    """One that is opened elsewhere would have gRPC's own retries, which can lose a call."""
    sources = [path for folder in PRODUCT for path in (ROOT / folder).rglob("*.py")]
    opening = [path for path in sources if opens_a_channel(path.read_text())]
    assert opening == [Path(grpc_channel.__file__)]
