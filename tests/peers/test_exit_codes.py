"""The exit codes of a failed job in docs/torchrun-scripts.md, compared with real launches of both programs."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests.lab import zygote
from tests.peers.conftest import ROOT, Launch, launch_environment

PAGE = ROOT / "docs" / "torchrun-scripts.md"
ENDS = {
    "`sys.exit(3)`": "import sys\nsys.exit(3)\n",
    "SIGSEGV": "import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)\n",
}


def codes() -> dict[str, tuple[int, int]]:
    """The page's rows: torchrun's code and bagua-launch's, by the end of the worker."""
    table = PAGE.read_text().partition("| torchrun exits with |")[2].partition("\n\n")[0]
    rows = re.findall(r"^\| (.+) \| (\d+) \| (\d+) \|$", table, re.MULTILINE)
    return {end: (int(theirs), int(ours)) for end, theirs, ours in rows}


def test_the_page_has_these_ends() -> None:
    assert codes().keys() == ENDS.keys()


@pytest.mark.parametrize("end", ENDS)
def test_a_worker_ends_the_job(launch: Launch, end: str) -> None:
    assert launch(script=ENDS[end]).returncode == codes()[end][1]


@pytest.mark.parametrize("end", ENDS)
def test_a_worker_ends_torchruns_job(tmp_path: Path, end: str) -> None:
    (tmp_path / "script.py").write_text(ENDS[end])
    line = [sys.executable, "-m", "torch.distributed.run", "--standalone", "script.py"]
    environment = launch_environment(tmp_path, OMP_NUM_THREADS="1")
    done = zygote.run_captured(line, environment, tmp_path, "", 60)
    assert done.returncode == codes()[end][0] and "ChildFailedError" in done.stderr, done.stderr


FAILS_LIVE = """
import sys
import bagua_core as bagua
bagua.init_process_group()
sys.exit(3) if bagua.get_rank() == 1 else bagua.barrier()
"""


def test_a_live_jobs_code_is_the_failed_workers_too(launch: Launch) -> None:
    done = launch("--nproc-per-node", "2", script=FAILS_LIVE)
    # which rank it had is not told where the other worker's broken connection came first
    assert done.returncode == 3 and re.search(r"first failure: .*\bslot 1\b", done.stderr), done.stderr
