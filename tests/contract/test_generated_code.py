"""The generated code loads without a warning: one from protobuf says that it was made for another version."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import bagua_contract
from tests.lab.wait import HANG_S


def test_generated_code_loads_where_warnings_are_errors() -> None:
    found = sorted(p.stem for p in Path(bagua_contract.__path__[0]).glob("*_pb2*.py"))
    assert {
        "membership_pb2",
        "session_pb2",
        "session_pb2_grpc",
        "control_pb2",
        "control_pb2_grpc",
        "etcd_pb2",
    } <= set(found)
    program = "".join(f"import bagua_contract.{name}\n" for name in found)
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
