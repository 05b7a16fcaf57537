"""Launchers that were started without standard streams, or in a directory that was removed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.faults.job import START_S

SCRIPT = """
import json, os, sys
print("to stdout"); print("to stderr", file=sys.stderr)
with open(sys.argv[1], "w") as file:
    json.dump([os.readlink(f"/proc/{os.getppid()}/fd/{fd}") for fd in (0, 1, 2)], file)
"""


ROOT = Path(__file__).parents[2]
OURS = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'protos'}"}


def run(words: str, directory: Path) -> subprocess.CompletedProcess[str]:
    """words: for a shell; "$0" is Python."""
    return subprocess.run(
        ["sh", "-c", words, sys.executable],
        cwd=directory,
        env=OURS,
        timeout=2 * START_S,
        check=False,
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize(("closing", "closed"), [("<&- >&- 2>&-", {0, 1, 2}), (">&-", {1}), ("2>&-", {2})])
def test_a_job_runs_without_standard_streams(tmp_path: Path, closing: str, closed: set[int]) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    found = tmp_path / "found"
    assert run(f'exec "$0" -m bagua_launch script.py {found} {closing}', tmp_path).returncode == 0
    of_agent = json.loads(found.read_text())
    assert {fd for fd in (0, 1, 2) if of_agent[fd] == os.devnull} >= closed, of_agent


def test_a_directory_that_is_gone_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "gone").mkdir()
    done = run(f'rmdir {tmp_path / "gone"}; exec "$0" -m bagua_launch /dev/null', tmp_path / "gone")
    assert done.returncode == 2
    assert done.stderr == "bagua-launch: the current directory is gone; change to one that exists\n"
