"""Launchers in an environment with nothing of ours but what a test gives."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from bagua_agent.config.job_config import JobConfig
from bagua_launch.node_facts import ThisNode
from tests.lab.wait import HANG_S
from tests.launch.launcher import STAND_IN, Completed, Launcher, LaunchProcess

ROOT = Path(__file__).parents[2]


@pytest.fixture
def launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Launcher:
    for name in list(os.environ):
        if name.startswith(("PET_", "BAGUA_", "TORCH_ELASTIC_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    monkeypatch.chdir(tmp_path)
    # These tests may run under nohup
    monkeypatch.setattr(ThisNode, "ignores", lambda self, signal_name: False)
    asked: list[JobConfig] = []

    def run_job(config: JobConfig) -> int:
        asked.append(config)
        return 7

    agent = ModuleType("bagua_agent.job.run")
    agent.__dict__["run_job"] = run_job
    monkeypatch.setitem(sys.modules, "bagua_agent.job.run", agent)
    return Launcher(tmp_path, asked)


@pytest.fixture
def launch_process(launch: Launcher) -> LaunchProcess:
    """A real process; `agent=True` puts the stand-in in the place of the agent."""

    def start(*words: str, agent: bool = False, **env: str) -> Completed:
        path = [str(ROOT), str(ROOT / "protos")]
        if agent:
            block_optimizer = launch.directory / "stand-in"
            block_optimizer.mkdir(exist_ok=True)
            (block_optimizer / "sitecustomize.py").write_text(STAND_IN)
            path.insert(0, str(block_optimizer))
        environ = {**os.environ, "PYTHONPATH": os.pathsep.join(path), **env}
        return subprocess.run(
            [sys.executable, "-m", "bagua_launch", *words],
            env=environ,
            cwd=launch.directory,
            capture_output=True,
            text=True,
            timeout=HANG_S,
            check=False,
        )

    return start
