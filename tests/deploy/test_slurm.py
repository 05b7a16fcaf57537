"""deploy/slurm/bagua.sbatch under substitutes for Slurm's programs, which start everything on this machine.

Of one substitute for srun the command starts once; of the other, for the commands of the manual, once for each node.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from bagua_agent.etcd.server.embedded import EmbeddedEtcd
from tests.docs.printed import printed
from tests.lab.wait import eventually, patiently

BATCH = Path(__file__).parents[2] / "deploy/slurm/bagua.sbatch"
NAMED = "deploy/slurm/bagua.sbatch"  # in the manual
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


# Takes the options that the manual gives, and stays until the batch ends.
SBATCH = """#!/usr/bin/env bash
set -euo pipefail
export SLURM_JOB_ID=$$ SLURM_JOB_NUM_NODES=1
while [[ $1 == --* ]]; do
  case $1 in
    --nodes) export SLURM_JOB_NUM_NODES=$2 ;;
    --gpus-per-node) export SLURM_GPUS_ON_NODE=$2 ;;
    *) echo "sbatch: unknown option $1"; exit 1 ;;
  esac
  shift 2
done
exec bash "$@"
"""
SRUN_ON_EACH = """#!/usr/bin/env bash
while [[ $1 == --* ]]; do shift; done
agents=()
for ((node = 0; node < SLURM_JOB_NUM_NODES; node++)); do
  "$@" &
  agents+=($!)
done
code=0
for agent in "${agents[@]}"; do wait "$agent" || code=$?; done
exit "$code"
"""
NVIDIA_SMI = """#!/usr/bin/env bash
for ((gpu = 0; gpu < SLURM_GPUS_ON_NODE; gpu++)); do echo "GPU $gpu: a substitute"; done
"""
# In restart mode, and without torch: it is started again when another node comes.
WAITS = """
import os, sys, time
while os.environ["WORLD_SIZE"] != os.environ["WORKERS_IN_ALL"]:
    time.sleep(0.05)
# a line is one write: all workers have the same terminal
sys.stdout.write(" ".join(["trained on", os.environ["WORLD_SIZE"], *sys.argv[1:]]) + "\\n")
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


class Cluster:
    """Submits what the manual prints; its jobs run in `folder`."""

    def __init__(self, folder: Path, workers: int, **variables: str) -> None:
        """workers: that the script waits for."""
        self.folder = folder
        self.log = folder / "log"
        (folder / "train.py").write_text(WAITS)
        (folder / "bin").mkdir()
        programs = {"sbatch": SBATCH, "srun": SRUN_ON_EACH, "nvidia-smi": NVIDIA_SMI}
        for name, text in programs.items():
            (folder / "bin" / name).write_text(text)
            (folder / "bin" / name).chmod(0o755)
        own = {k: v for k, v in os.environ.items() if not k.startswith(("BAGUA_", "PET_", "CUDA_"))}
        self.environment = {
            **own,
            "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
            "WORKERS_IN_ALL": str(workers),
            "BAGUA_HOST": "127.0.0.1",
            "BAGUA_PYTHON": sys.executable,
            "PET_START_METHOD": "spawn",
            **variables,
        }

    def submit(self, words: list[str]) -> subprocess.Popen[bytes]:
        """words: behind `sbatch`."""
        with self.log.open("a") as log:
            return subprocess.Popen(
                ["sbatch", *words], cwd=self.folder, env=self.environment, stdout=log, stderr=log
            )

    def await_trained(self, *batches: subprocess.Popen[bytes]) -> list[str]:
        """What the workers print, when all batches have ended well."""
        codes = [patiently(batch.wait, 90) for batch in batches]
        assert codes == [0] * len(batches), self.log.read_text()
        return [line for line in self.log.read_text().splitlines() if line.startswith("trained on ")]


def test_a_batch_has_an_agent_on_each_node_and_a_worker_for_each_gpu(tmp_path: Path) -> None:
    given = {"4": "2", "8": "2", NAMED: str(BATCH)}
    words = printed("docs/guide/slurm.md", "--gpus-per-node 8", given)
    assert words == printed("deploy/README.md", "--gpus-per-node 8", given)
    cluster = Cluster(tmp_path, workers=4)
    assert cluster.await_trained(cluster.submit(words)) == ["trained on 4 --lr 0.1"] * 4


def test_a_second_allocation_joins_the_first(tmp_path: Path, etcd: EmbeddedEtcd) -> None:
    variables = printed("docs/guide/slurm.md", "export BAGUA_ETCD", {"etcd-1:2379": etcd.endpoint})
    cluster = Cluster(tmp_path, workers=3, **dict(word.split("=", 1) for word in variables))
    batch = {NAMED: str(BATCH)}
    first = printed("docs/guide/slurm.md", "--nodes 4 deploy", {"4": "2", **batch})
    second = printed("docs/guide/slurm.md", "--nodes 2 deploy", {"2": "1", **batch})
    assert cluster.await_trained(cluster.submit(first), cluster.submit(second)) == ["trained on 3"] * 3
