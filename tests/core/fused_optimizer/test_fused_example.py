"""The documents' example says what they say of it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from tests.docs.printed import printed
from tests.lab.wait import HANG_S

ROOT = Path(__file__).parents[3]


def test_the_example() -> None:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "protos")])}
    example = printed("docs/fused-optimizer.md", "examples/fused_optimizer.py")
    words = [sys.executable, *example, "--layers", "8"]
    done = subprocess.run(
        words, cwd=ROOT, env=env, capture_output=True, text=True, timeout=HANG_S, check=False
    )
    assert done.returncode == 0, done.stderr
    assert len(re.findall(r"epoch \d: loss [\d.]+", done.stdout)) == 4
    assert "same bits: True" in done.stdout
    assert len(re.findall(r"(alone|fused): [\d.]+ ms a step", done.stdout)) == 2
