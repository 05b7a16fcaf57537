"""What a host of `--hosts` says and ends with, started as ssh starts it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.lab.launched import environment

LIMIT_S = 60.0


def test_a_mistake_on_one_host_is_one_line(tmp_path: Path) -> None:
    request = {"files": {}, "arguments": ["missing.py"], "environment": {}, "directory": str(tmp_path)}
    words = [sys.executable, "-m", "bagua_launch.remote_node"]
    with subprocess.Popen(
        words,
        env=environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as node:
        try:
            assert node.stdin is not None and node.stderr is not None
            node.stdin.write(json.dumps(request) + "\n")
            node.stdin.flush()  # its end would end the node
            assert node.wait(LIMIT_S) == 2
            (line,) = node.stderr.read().splitlines()
        finally:
            node.kill()
    assert line.startswith("bagua-launch: ") and "missing.py" in line
