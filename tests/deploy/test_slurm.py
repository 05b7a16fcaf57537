"""deploy/slurm/bagua.sbatch with a fake srun, which starts its command once, here."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.lab.wait import eventually

BATCH = Path(__file__).parents[2] / "deploy/slurm/bagua.sbatch"
SRUN = """#!/bin/sh
for word in "$@"; do case $word in --kill-on-bad-exit=0|--wait=0) shift;; *) break;; esac; done
echo "$@" >"$SRUN_SAID"
exec "$@"
"""
SCRIPT = """
import pathlib, sys, time
import bagua_core as bagua
bagua.init_process_group()
while not pathlib.Path("end").exists():
    bagua.next_step()
    pathlib.Path("began").touch()  # before the first boundary there is nothing to leave at
    time.sleep(0.01)
sys.exit(int(sys.argv[1]))
"""


class Batch:
    def __init__(self, folder: Path, *words: str) -> None:
        self.folder = folder
        (folder / "bin").mkdir()
        (folder / "bin/srun").write_text(SRUN)
        (folder / "bin/srun").chmod(0o755)
        (folder / "script.py").write_text(SCRIPT)
        environment = {
            **os.environ,
            "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
            "SRUN_SAID": str(folder / "said"),
            "SLURM_JOB_ID": str(os.getpid()),
            "SLURM_JOB_NUM_NODES": "4",
            "BAGUA_HOST": "127.0.0.1",
            "BAGUA_PYTHON": sys.executable,
        }
        self.log = folder / "log"
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                ["bash", str(BATCH), *words], cwd=folder, env=environment, stdout=log, stderr=log
            )

    def await_began(self) -> None:
        eventually((self.folder / "began").exists, 45, lambda: f"the script to begin\n{self.log.read_text()}")


@pytest.mark.parametrize("code", [0, 3])
def test_a_batch_ends_as_its_job_does(tmp_path: Path, code: int) -> None:
    (tmp_path / "end").touch()
    batch = Batch(tmp_path, "script.py", str(code))
    assert batch.process.wait(90) == code, batch.log.read_text()
    said = (tmp_path / "said").read_text()
    port = 20000 + os.getpid() % 12000
    assert f"--nnodes 1:4 --nproc-per-node 1 --rdzv-id slurm-{os.getpid()}" in said
    assert f"--rdzv-endpoint 127.0.0.1:{port} script.py {code}" in said


def test_an_order_to_end_reaches_the_agents(tmp_path: Path) -> None:
    batch = Batch(tmp_path, "script.py", "0")
    batch.await_began()
    batch.process.send_signal(signal.SIGTERM)
    assert batch.process.wait(60) == 128 + signal.SIGTERM, batch.log.read_text()
    log = batch.log.read_text()
    assert "no node of the job is left" in log or "stopped: every worker left" in log


def test_a_batch_without_a_script_says_how_to_use_it() -> None:
    done = subprocess.run(["bash", str(BATCH)], capture_output=True, text=True)
    assert done.returncode == 64
    assert "SCRIPT [ARGUMENTS]" in done.stderr
