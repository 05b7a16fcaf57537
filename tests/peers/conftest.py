"""Real jobs of one node. The launcher and its warm parent are forked from the lab's zygote, unless a test asks for
spawned workers: then the launcher is a program of its own too, as a person starts it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from tests.lab import zygote
from tests.lab.wait import patiently

ROOT = Path(__file__).parents[2]
Launch = Callable[..., subprocess.CompletedProcess[str]]
_NOT_INHERITED = ("PET_", "BAGUA_", "TORCHELASTIC_", "TORCH_ELASTIC_", "OMP_", "MASTER_")


def launch_environment(directory: Path, **env: str) -> dict[str, str]:
    """Ours, with nothing that a launcher reads but what is given."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(_NOT_INHERITED)}
    path = os.pathsep.join((str(ROOT), str(ROOT / "protos")))
    return {**kept, "PYTHONPATH": path, "HOME": str(directory), **env}


@pytest.fixture
def launch(tmp_path: Path) -> Launch:
    """launch(*words, script="text", env={...}): bagua-launch with `words`, then script.py. It runs in tmp_path."""

    def start(
        *words: str,
        script: str | None = None,
        env: Mapping[str, str] | None = None,
        start_method: str | None = None,
        timeout_s: float = 60,
        stdin: str = "",
    ) -> subprocess.CompletedProcess[str]:
        program: tuple[str, ...] = ()
        if script is not None:
            (tmp_path / "script.py").write_text(script)
            program = ("script.py",)
        method = () if start_method is None else ("--start-method", start_method)
        line = [sys.executable, "-m", "bagua_launch", *method, *words, *program]
        environment = launch_environment(tmp_path, **(env or {}))
        if start_method != "spawn" and zygote.can_start(line, {"OMP_NUM_THREADS": "1", **environment}):
            return zygote.run_captured(line, environment, tmp_path, stdin, timeout_s)
        with subprocess.Popen(
            line,
            cwd=tmp_path,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as process:
            given = [stdin]  # a wait that is repeated must not give it again
            try:
                shown, said = patiently(
                    lambda seconds: process.communicate(given.pop() if given else None, seconds), timeout_s
                )
            except BaseException:
                process.kill()
                raise
        return subprocess.CompletedProcess(line, process.returncode, shown, said)

    return start
