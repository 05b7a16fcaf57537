"""deploy/slurm/bagua.sbatch in a real Slurm, whose nodes are hosts of a lab."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.docs.printed import printed
from tests.faults.job import ROOT, SCRIPT
from tests.lab import ledger, slurm
from tests.lab.fixtures import MakeLab, make_lab
from tests.lab.slurm import Slurm
from tests.lab.wait import HANG_S, eventually

__all__ = ["make_lab"]

BATCH = ROOT / "deploy/slurm/bagua.sbatch"
NAMED = "deploy/slurm/bagua.sbatch"  # in the manual
DEADLINE_S = 60.0
POLL_S = 0.1
SAMPLES, EPOCHS = 576, 2

# In restart mode, and without torch: it is started again when another node comes.
WAITS = """
import os, sys, time
while os.environ["WORLD_SIZE"] != "4":
    time.sleep(0.05)
# a line is one write: all workers of a node have the same output
sys.stdout.write(" ".join(["trained on", os.environ["WORLD_SIZE"], *sys.argv[1:]]) + "\\n")
"""
NVIDIA_SMI = """#!/bin/sh
echo "GPU 0: a substitute"
echo "GPU 1: a substitute"
"""


class Jobs:
    """What a person submits from `folder`, which every host sees."""

    def __init__(self, cluster: Slurm, folder: Path) -> None:
        self.cluster = cluster
        self.folder = folder
        self.out = folder / "out"
        self.out.mkdir()
        self.records = folder / "ledger"
        own = {k: v for k, v in os.environ.items() if not k.startswith(("BAGUA_", "PET_", "CUDA_", "SLURM_"))}
        self.environment = {
            **own,
            "PYTHONPATH": f"{ROOT}:{ROOT / 'protos'}",
            "OMP_NUM_THREADS": "1",
            "BAGUA_PYTHON": sys.executable,
            "BAGUA_LEDGER": str(self.records),
        }
        self.pace: list[str] = []  # arguments of the training script
        self._submitted: list[str] = []

    def submit(self, *words: str) -> str:
        """words: behind `sbatch`. The id of the job."""
        job_id = self.cluster.submit(*words, cwd=self.folder, env=self.environment)
        self._submitted.append(job_id)
        return job_id

    def train(self, *words: str) -> str:
        """`submit` of a batch that ends with the name of the training script."""
        if not (self.folder / "train.py").exists():
            (self.folder / "train.py").symlink_to(SCRIPT)
        data = ["--samples", str(SAMPLES), "--epochs", str(EPOCHS)]
        return self.submit(*words, "--out", str(self.out), *data, *self.pace)

    def said(self, job_id: str) -> str:
        path = self.folder / f"slurm-{job_id}.out"
        return path.read_text(errors="replace") if path.exists() else ""

    def await_world(self, size: int, after_step: int = 0) -> int:
        """The first committed step above `after_step` by `size` workers."""

        def found() -> int:
            if not self.records.is_dir():
                return 0
            lines = ledger.read(self.records).lines
            return next((x.step for x in lines if x.step > after_step and x.world_size == size), 0)

        why = f"a step by {size} after {after_step}"
        return eventually(found, DEADLINE_S, lambda: f"{why}\n{self.all_said()}", POLL_S)

    def preempt(self) -> None:
        """A job of a partition that goes before others takes all processors of two nodes, and has ended."""
        size = ["--nodes", "2", "--cpus-per-task", "2"]
        urgent = self.submit("--partition", "urgent", *size, "--wrap", "true")
        self.cluster.await_state(urgent, "COMPLETED", deadline_s=HANG_S)

    def finish(self, *job_ids: str) -> None:
        """Let the training end; all of these end well, and every sample was used once."""
        (self.out / "hurry").touch()
        for job_id in job_ids:
            record = self.cluster.await_state(job_id, "COMPLETED", "FAILED")
            assert record["ExitCode"] == "0:0", f"{record}\n{self.all_said()}"
        assert ledger.read(self.records).check(SAMPLES, EPOCHS) == []
        self.cluster.await_only_daemons()

    def all_said(self) -> str:
        said = [f"---- job {job_id}\n{self.said(job_id)}" for job_id in self._submitted]
        return "\n".join([*said, self.cluster.log()])


@pytest.fixture
def start(make_lab: MakeLab, tmp_path: Path) -> Iterator[Callable[[int], Jobs]]:
    """Starts a Slurm of so many nodes."""
    if reason := slurm.unavailable():
        pytest.skip(reason)
    started: list[Slurm] = []

    def make(nodes: int) -> Jobs:
        started.append(Slurm(make_lab(1 + nodes)))
        started[-1].start()
        folder = tmp_path / "jobs"
        folder.mkdir()
        return Jobs(started[-1], folder)

    yield make
    for cluster in started:
        cluster.close()


def test_a_batch_without_a_script_says_how_to_use_it() -> None:
    done = subprocess.run(["bash", str(BATCH)], capture_output=True, text=True)
    assert done.returncode == 64
    assert "SCRIPT [ARGUMENTS]" in done.stderr


@pytest.mark.parametrize(("given", "once"), [({}, "1"), ({"BAGUA_ONCE": "0"}, "0")])
def test_a_batch_whose_job_has_succeeded_does_not_run_it_again(
    tmp_path: Path, given: dict[str, str], once: str
) -> None:
    (tmp_path / "srun").write_text('#!/bin/sh\necho "$BAGUA_ONCE"\n')
    (tmp_path / "srun").chmod(0o755)
    slurms = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2"}
    line = ["bash", str(BATCH), "train.py"]
    done = subprocess.run(
        line, env={**slurms, "BAGUA_ETCD": "e:1", **given}, capture_output=True, text=True, timeout=HANG_S
    )
    assert (done.stdout, done.stderr) == (f"{once}\n", "")


def test_a_batch_has_an_agent_on_each_node_and_a_worker_for_each_gpu(start: Callable[[int], Jobs]) -> None:
    given = {"4": "2", "8": "2", NAMED: str(BATCH)}
    words = printed("docs/guide/slurm.md", "--gpus-per-node 8", given)
    assert words == printed("deploy/README.md", "--gpus-per-node 8", given)
    jobs = start(2)
    (jobs.folder / "train.py").write_text(WAITS)
    (jobs.folder / "nvidia-smi").write_text(NVIDIA_SMI)
    (jobs.folder / "nvidia-smi").chmod(0o755)
    jobs.environment |= {"PATH": f"{jobs.folder}:{os.environ['PATH']}", "PET_START_METHOD": "spawn"}
    job_id = jobs.submit(*words)
    record = jobs.cluster.await_state(job_id, "COMPLETED", "FAILED")
    lines = [line for line in jobs.said(job_id).splitlines() if line.startswith("trained on ")]
    assert lines == ["trained on 4 --lr 0.1"] * 4, jobs.said(job_id)
    assert (record["ExitCode"], record["NumNodes"]) == ("0:0", "2")
    jobs.cluster.await_only_daemons()


def test_a_second_allocation_joins_the_first_and_a_node_is_lost(start: Callable[[int], Jobs]) -> None:
    jobs = start(3)
    etcd = jobs.cluster.lab.etcd(jobs.cluster.controller)
    variables = printed("docs/guide/slurm.md", "export BAGUA_ETCD", {"etcd-1:2379": etcd.endpoints})
    jobs.environment |= dict(word.split("=", 1) for word in variables)
    batch = {NAMED: str(BATCH)}
    first = printed("docs/guide/slurm.md", "--nodes 4 deploy", {"4": "2", **batch})
    second = printed("docs/guide/slurm.md", "--nodes 2 deploy", {"2": "1", **batch})
    one = jobs.train(*first)
    jobs.await_world(2)
    other = jobs.train(*second)
    three = jobs.await_world(3)
    _, lost = jobs.cluster.hosts_of(one)
    jobs.cluster.lose(lost)
    assert lost not in jobs.cluster.hosts_of(one)
    jobs.await_world(2, after_step=three)
    jobs.finish(one, other)
    late = jobs.train(*second)
    record = jobs.cluster.await_state(late, "COMPLETED", "FAILED", deadline_s=HANG_S)
    assert record["ExitCode"] == "0:0" and "has succeeded" in jobs.said(late), jobs.all_said()
    assert ledger.read(jobs.records).check(SAMPLES, EPOCHS) == [], (
        "an allocation that comes late trains nothing"
    )


def continues(jobs: Jobs, *options: str, ask: Callable[[str], object]) -> None:
    """All nodes of a batch leave at a step boundary after `ask` with its id, and a second batch goes on there."""
    jobs.environment |= {"BAGUA_JOB": "demo", "BAGUA_CHECKPOINT_DIR": str(jobs.folder / "checkpoints")}
    before = jobs.train(*options, "--nodes", "2", str(BATCH), "train.py")
    jobs.await_world(2)
    ask(before)
    record = jobs.cluster.await_state(before, "FAILED", "COMPLETED", deadline_s=HANG_S)
    assert record["ExitCode"] == f"{128 + signal.SIGURG}:0", f"{record}\n{jobs.said(before)}"
    assert jobs.said(before).count("leaving at the next step boundary") == 2
    jobs.cluster.await_only_daemons()
    after = jobs.train("--nodes", "1", str(BATCH), "train.py")
    jobs.await_world(1)
    jobs.finish(after)
    found = ledger.read(jobs.records)
    assert [start.run for start in found.resumptions] == [1, 2], "the second batch goes on from a checkpoint"
    assert found.resumptions[1].resumed_at_step > 0
    assert found.voided == (), "no step was done again"


def test_a_signal_ends_a_job_at_a_step_boundary_and_the_next_goes_on(start: Callable[[int], Jobs]) -> None:
    jobs = start(2)

    def ask(job_id: str) -> None:
        jobs.cluster.run("scancel", *printed("docs/guide/slurm.md", "--signal", {"1234": job_id}))

    continues(jobs, ask=ask)


@pytest.mark.long
def test_the_time_limit_is_announced_by_that_signal(start: Callable[[int], Jobs]) -> None:
    """After one and a half minutes of three, or up to half a minute later."""
    jobs = start(2)
    jobs.pace = ["--step-s", "4"]  # three minutes of them
    continues(jobs, "--time", "3", ask=lambda _: None)


@pytest.mark.long
def test_preemption_with_notice_sends_that_signal(start: Callable[[int], Jobs]) -> None:
    """Where the partition has a GraceTime, and the cluster `SlurmctldParameters=preempt_send_user_signal`."""
    jobs = start(2)
    continues(
        jobs,
        *("--partition", "spot-with-notice", "--cpus-per-task", "2"),
        ask=lambda _: jobs.preempt(),
    )


@pytest.mark.long
@pytest.mark.parametrize("event", ["scancel", "requeue", "preemption"])
def test_a_job_that_slurm_ends_goes_on_from_a_periodic_checkpoint(
    start: Callable[[int], Jobs], event: str
) -> None:
    jobs = start(2)
    cluster = jobs.cluster
    jobs.environment |= {"BAGUA_JOB": "demo", "BAGUA_CHECKPOINT_DIR": str(jobs.folder / "checkpoints")}
    jobs.environment["BAGUA_CHECKPOINT_EVERY"] = "3"
    words = ["--nodes", "2", str(BATCH), "train.py"]
    job_id = jobs.train("--partition", "spot", "--cpus-per-task", "2", *words)
    jobs.await_world(2, after_step=6)
    match event:
        case "scancel":
            cluster.run("scancel", job_id)
            cluster.await_state(job_id, "CANCELLED")
            cluster.await_only_daemons()
            job_id = jobs.train(*words)
        case "requeue":
            cluster.run("scontrol", "requeue", job_id)
        case "preemption":
            jobs.preempt()
    eventually(lambda: len(ledger.read(jobs.records).resumptions) == 2, HANG_S, jobs.all_said, POLL_S)
    jobs.finish(job_id)
    assert ledger.read(jobs.records).resumptions[1].resumed_at_step >= 3
    assert cluster.job(job_id)["Restarts"] == ("0" if event == "scancel" else "1")


@pytest.mark.long
def test_the_first_node_of_an_allocation_is_lost(start: Callable[[int], Jobs]) -> None:
    """The batch script is lost with it; the others train to the end."""
    jobs = start(3)
    etcd = jobs.cluster.lab.etcd(jobs.cluster.controller)
    jobs.environment["BAGUA_ETCD"] = etcd.endpoints
    job_id = jobs.train("--nodes", "3", str(BATCH), "train.py")
    three = jobs.await_world(3)
    jobs.cluster.lose(jobs.cluster.hosts_of(job_id)[0])
    jobs.await_world(2, after_step=three)
    (jobs.out / "hurry").touch()
    eventually(lambda: len(list((jobs.out / "ends").glob("*.json"))) == 2, DEADLINE_S, "two workers end")
    assert ledger.read(jobs.records).check(SAMPLES, EPOCHS) == []
    assert jobs.cluster.job(job_id)["JobState"] == "RUNNING"
    jobs.cluster.run("scancel", job_id)
    jobs.cluster.await_state(job_id, "CANCELLED")
