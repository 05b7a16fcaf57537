"""A process that holds a retired Gloo group with an operation under way ends with its own exit status."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.lab.wait import HANG_S

ROOT = Path(__file__).parents[3]

TESTS = """
import os
import torch
from tests.core.communication.worlds import gloo_world

class Finalized:
    def __del__(self, write=os.write):
        write(2, b"the interpreter was finalized")

finalized = Finalized()

def test_one_rank_is_left_waiting():
    ranks = gloo_world(2)
    pending = ranks[0].allreduce(torch.ones(3))  # the other rank never starts it
    for rank in ranks:
        rank.abort("given up")
    assert not pending.is_done()

def test_that_fails():
    assert not finalized
"""


def test_pytest_ends_with_its_own_status_and_without_finalization(tmp_path: Path) -> None:
    test = tmp_path / "test_left_waiting.py"
    test.write_text(TESTS)
    ended = subprocess.run(
        [
            *(
                sys.executable,
                "-m",
                "pytest",
                "-q",
                "-c",
                str(ROOT / "pyproject.toml"),
                "--rootdir",
                str(ROOT),
            ),
            *("-p", "tests.conftest", "-p", "no:cacheprovider", str(test)),
        ],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'protos'}"},
        capture_output=True,
        text=True,
        timeout=HANG_S,
    )
    assert ended.returncode == pytest.ExitCode.TESTS_FAILED, ended.stdout + ended.stderr
    assert "1 failed, 1 passed" in ended.stdout
    assert "finalized" not in ended.stderr
