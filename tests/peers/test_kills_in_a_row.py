"""A worker that is killed again and again ends its job, with the kernel's record if there is one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from bagua_agent.membership.policy import Policy
from bagua_agent.node.worker_ends import KILLS_FORGOTTEN_S, kills_after
from bagua_agent.workers.exits.exit_cause import exit_cause
from bagua_agent.workers.exits.memory_kills import MemoryKills
from tests.lab.wait import eventually
from tests.peers.conftest import Launch

KILLED = """
import os, signal
print("restart " + os.environ["TORCHELASTIC_RESTART_COUNT"], flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
LIVE = """
import os, signal
import bagua_core as bagua
bagua.init_process_group()
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_kills_without_end_end_the_job_and_each_counts_as_a_restart(launch: Launch) -> None:
    done = launch("--max-restarts", "3", script=KILLED)
    starts = Policy().most_kills_in_a_row + 1
    assert done.returncode == 128 + signal.SIGKILL
    assert done.stdout.splitlines() == [f"restart {n}" for n in range(starts)]
    assert f"{starts} workers in a row were killed in one slot" in done.stderr, done.stderr
    assert "killed by SIGKILL" in done.stderr


def test_a_larger_budget_allows_as_many_kills(launch: Launch) -> None:
    done = launch("--max-restarts", "13", script=KILLED)
    assert len(done.stdout.splitlines()) == 14, done.stderr


def test_kills_before_the_first_step_end_a_live_job(launch: Launch) -> None:
    done = launch("--max-restarts", "3", script=LIVE, start_method="warm")
    assert done.returncode == 128 + signal.SIGKILL
    assert "ended before their first step, again and again; the last: killed by SIGKILL" in done.stderr


def test_the_kernels_log_names_the_process(tmp_path: Path) -> None:
    log = tmp_path / "kmsg"
    log.write_text(
        "6,1,1,-;Memory cgroup out of memory: Killed process 77 (python) total-vm:1kB, anon-rss:2kB\n"
        "6,2,2,-;eth0: link up\n"
    )
    kills = MemoryKills(log, tmp_path)
    assert kills.record_of(7) == ""
    assert kills.record_of(77).startswith("Memory cgroup out of memory: Killed process 77 (python)")
    assert "out of memory: Memory cgroup" in exit_cause(-9, out_of_memory=kills.record_of(77)).summary


V1_MOUNT = "35 31 0:32 / /cg/memory rw - cgroup cgroup rw,memory\n"
V2_MOUNT = "41 31 0:38 / /cg/unified rw - cgroup2 cgroup2 rw\n"


@pytest.mark.parametrize(
    ("groups", "mounts", "counter"),
    [
        ("0::/job\n", V2_MOUNT, "cg/unified/job/memory.events"),
        ("4:memory:/job\n", V1_MOUNT, "cg/memory/job/memory.oom_control"),
        ("4:memory:/job\n0::/job\n", V1_MOUNT + V2_MOUNT, "cg/memory/job/memory.oom_control"),
        ("4:pids:/job\n0::/job\n", V2_MOUNT, "cg/unified/job/memory.events"),
        ("4:memory:/docker/9\n", V1_MOUNT.replace(" / ", " /docker/9 "), "cg/memory/memory.oom_control"),
    ],
    ids=["version 2", "version 1", "hybrid 1", "hybrid 2", "container"],
)
def test_a_cgroups_counter_tells_where_the_log_is_closed(
    tmp_path: Path, groups: str, mounts: str, counter: str
) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(groups)
    (tmp_path / "proc/self/mountinfo").write_text(mounts)
    (tmp_path / counter).parent.mkdir(parents=True)
    (tmp_path / counter).write_text("under_oom 0\noom_kill 4\n")
    kills = MemoryKills(tmp_path / "no log", tmp_path)
    assert kills.record_of(7) == ""
    (tmp_path / counter).write_text("under_oom 0\noom_kill 5\n")
    assert kills.record_of(7) == "the kernel killed 1 process(es) of this cgroup for lack of memory"
    assert kills.record_of(7) == ""


@pytest.fixture
def takes_too_much() -> Iterator[str]:
    """A program that enters a memory cgroup (v1 or v2) of 32 MiB and writes to 200 MiB."""
    root = Path("/sys/fs/cgroup")
    if (root / "memory").is_dir():
        group, limit = root / "memory" / f"bagua-test-{os.getpid()}", "memory.limit_in_bytes"
    else:
        group, limit = root / f"bagua-test-{os.getpid()}", "memory.max"
    try:
        group.mkdir()
    except OSError as problem:
        pytest.skip(f"no memory cgroup can be made here: {problem}")
    try:
        (group / limit).write_text(str(32 << 20))
    except OSError as problem:
        group.rmdir()
        pytest.skip(f"a memory cgroup can have no limit here: {problem}")
    enter = f"import os\nopen('{group}/cgroup.procs', 'w').write(str(os.getpid()))\n"
    try:
        yield enter + "x = b'1' * (200 << 20)\nwhile 1: pass\n"
    finally:
        eventually(lambda: not (group / "cgroup.procs").read_text(), 20, "the cgroup is empty")
        group.rmdir()


def test_a_real_kill_of_the_kernel_is_found(takes_too_much: str) -> None:
    process = subprocess.Popen([sys.executable, "-c", takes_too_much])
    try:
        assert process.wait(20) == -9
    finally:
        process.kill()
        process.wait(20)
    assert f"Killed process {process.pid}" in MemoryKills().record_of(process.pid)


def test_a_job_whose_worker_takes_too_much_memory_ends_with_the_kernels_record(
    launch: Launch, takes_too_much: str
) -> None:
    done = launch(
        "--max-restarts", "0", script=f"import os\nprint(os.getpid(), flush=True)\n{takes_too_much}"
    )
    assert done.returncode != 0
    killed = done.stdout.split()
    assert len(killed) == Policy().most_kills_in_a_row + 1, done.stderr
    [result] = [
        line for line in done.stderr.splitlines() if "workers in a row were killed in one slot" in line
    ]
    assert "out of memory: Memory cgroup out of memory: Killed process" in result, done.stderr
    assert f"Killed process {killed[-1]} (" in result


@pytest.mark.parametrize(
    ("before", "killed", "has_committed", "ran_s", "after"),
    [
        (0, True, False, 1.0, 1),
        (9, True, False, 599.0, 10),
        (9, True, False, KILLS_FORGOTTEN_S, 1),
        (9, True, True, 1.0, 1),
        (9, False, False, 1.0, 9),
        (9, False, False, KILLS_FORGOTTEN_S, 0),
    ],
)
def test_progress_forgets_earlier_kills(
    before: int, killed: bool, has_committed: bool, ran_s: float, after: int
) -> None:
    assert kills_after(before, killed=killed, has_committed=has_committed, ran_s=ran_s) == after


PROGRESSES = """
import os, signal
from pathlib import Path
import torch, bagua_core as bagua
bagua.init_process_group()
net = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
model = bagua.DistributedDataParallel(net, optimizers=[optimizer])
kills, began = Path("kills"), None
while (step := bagua.next_step()) < 100_000 and not Path("enough").exists():
    began = step if began is None else began
    if os.environ["LOCAL_RANK"] == "0" and step - began >= 3:
        kills.open("a").write("k")
        if kills.stat().st_size == 13:
            Path("enough").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    optimizer.zero_grad()
    model(torch.ones(4, 2)).sum().backward()
    optimizer.step()
"""


def test_kills_with_committed_steps_in_between_never_end_a_job(launch: Launch, tmp_path: Path) -> None:
    done = launch("--nproc-per-node", "2", script=PROGRESSES, start_method="warm", timeout_s=90)
    assert (tmp_path / "kills").read_text() == "k" * 13, done.stderr
    assert done.returncode == 0 and "workers in a row" not in done.stderr, done.stderr
