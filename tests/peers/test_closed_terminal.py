"""The end of a terminal lets the workers of its job leave at a step boundary, with --hosts too."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
from pathlib import Path

from tests.agent.workers.worker_lab import is_running
from tests.lab.wait import HANG_S, eventually, patiently
from tests.peers.conftest import launch_environment

SCRIPT = """
import os, time
from pathlib import Path

import torch

import bagua_core as bagua

bagua.init_process_group()
module = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
model = bagua.DistributedDataParallel(module, optimizers=[optimizer])
nowhere = os.open(os.devnull, os.O_WRONLY)  # the runtime puts it behind a closed stdout, in a thread of its own
is_terminal = os.isatty(1)
loader = bagua.ElasticDataLoader(torch.utils.data.TensorDataset(torch.ones(1000, 1)), 1)
try:
    for (x,) in loader:
        at_boundary = False
        optimizer.zero_grad()
        model(x).mean().backward()
        optimizer.step()
        if loader.step >= 2:  # without a step there is no boundary to leave at
            Path("launcher.new").write_text(os.environ["LAUNCHER"])
            os.rename("launcher.new", "launcher")
            while not os.path.exists("go") or (is_terminal and not os.path.sameopenfile(1, nowhere)):
                time.sleep(0.01)
        print("step", loader.step, flush=True)
        at_boundary = True
except (SystemExit, KeyboardInterrupt):
    if at_boundary:
        Path("left").touch()
"""
# runs on this host what ssh runs on another, whose output is no terminal there
SSH = """#!/bin/bash
set -o pipefail
bash -c "$2" 2>&1 | cat
"""


def close_during_step(directory: Path, *words: str) -> None:
    """Starts bagua-launch from an interactive shell, and closes its terminal while a worker is in a step. Returns once
    the worker has left at the boundary behind it.

    The shell passes the hangup on, and the kernel sends another when the shell ends.
    """
    (directory / "script.py").write_text(SCRIPT)
    primary, secondary = pty.openpty()
    line = " ".join([sys.executable, "-m", "bagua_launch", "--start-method", "spawn", *words, "script.py"])
    with subprocess.Popen(
        ["setsid", "--ctty", "bash", "--norc", "--noprofile", "-i"],
        cwd=directory,
        env=launch_environment(directory, TMPDIR=str(directory)),
        stdin=secondary,
        stdout=secondary,
        stderr=secondary,
    ) as shell:
        os.close(secondary)
        try:
            os.write(primary, f"sh -c 'LAUNCHER=$$ exec {line}'\n".encode())
            eventually((directory / "launcher").exists, HANG_S, "the second step")
        except BaseException:
            shell.kill()
            raise
        finally:
            os.close(primary)
        patiently(shell.wait, HANG_S)
    (directory / "go").touch()
    launcher = int((directory / "launcher").read_text())
    try:
        eventually(lambda: not is_running(launcher), HANG_S, "the launcher has ended")
    finally:
        if is_running(launcher):
            os.kill(launcher, signal.SIGKILL)
    eventually((directory / "left").exists, 10, "the script left at the boundary")


def test_workers_leave_at_a_boundary_when_their_terminal_is_closed(tmp_path: Path) -> None:
    close_during_step(tmp_path)


def test_a_closed_terminal_of_several_hosts_leaves_no_private_key(tmp_path: Path) -> None:
    ssh = tmp_path / "ssh"
    ssh.write_text(SSH)
    ssh.chmod(0o700)
    close_during_step(tmp_path, "--hosts", "127.0.0.1", "--ssh", str(ssh))
    assert not list(tmp_path.glob("bagua-*"))
