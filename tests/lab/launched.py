"""Runs `bagua-launch` on this machine, started by the zygote where that can do it."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from tests.lab import zygote
from tests.lab.process import LabProcess

ROOT = Path(__file__).resolve().parents[2]


class Launched(NamedTuple):
    returncode: int
    said: str  # on both streams


def environment(**more: str) -> dict[str, str]:
    """This process's, without variables that address a launcher, and with this checkout importable."""
    own = {k: v for k, v in os.environ.items() if not k.startswith(("BAGUA_", "PET_"))}
    return own | {"PYTHONPATH": f"{ROOT}:{ROOT / 'protos'}", "OMP_NUM_THREADS": "1", **more}


def launch(*words: str, limit_s: float = 180.0, directory: Path | None = None, **more: str) -> Launched:
    """words: behind `bagua-launch`. directory: where it starts; None: this process's. more: environment variables.

    Raises subprocess.TimeoutExpired after limit_s.
    """
    command = [sys.executable, "-m", "bagua_launch", *words]
    with tempfile.TemporaryDirectory() as scratch:
        output = Path(scratch, "said")
        code = zygote.run(command, environment(**more), output, directory or Path.cwd(), limit_s)
        return Launched(code, output.read_text(errors="replace"))


def start(*words: str, output: Path, directory: Path) -> LabProcess:
    """As `launch`, which it does not wait for. output: for both streams."""
    command, env = [sys.executable, "-m", "bagua_launch", *words], environment()
    can_fork = zygote.can_start(command, env)
    forked = zygote.start(command, env, output, str(directory), None) if can_fork else None
    return LabProcess([], command, env=env, output=output, host_name="here", forked=forked)
