"""The command that runs the contract of communicators on GPUs works, and skips all without one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.docs.printed import printed
from tests.lab.wait import HANG_S

ROOT = Path(__file__).parents[2]


@pytest.mark.long
def test_the_printed_command_runs_the_contract_or_skips_it() -> None:
    words = printed("docs/collectives.md", "pytest -m gpu")
    done = subprocess.run(
        [sys.executable, *words], cwd=ROOT, capture_output=True, text=True, timeout=5 * HANG_S
    )
    assert done.returncode == 0, done.stdout
    if not torch.cuda.is_available():
        assert "no CUDA device" in done.stdout and " passed" not in done.stdout, done.stdout
