"""Installs torchft from PyPI into a directory of its own, beside the torch that is there.

The directory goes on PYTHONPATH of torchft's processes only. systems.py starts them.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

VERSION = "0.2.0"
# What torchft's metadata asks for, but without torch: pip must not bring a second one.
_REQUIREMENTS = ("opentelemetry-sdk>=1.39", "opentelemetry-exporter-otlp-proto-http>=1.39")
_PIP_TIMEOUT_S = 180.0


class NotInstallable(RuntimeError):
    """torchft can't be had here; the benchmark goes on without it."""


def torchft_directory(root: Path) -> Path:
    """The directory to put on PYTHONPATH, made if it is missing. Raises NotInstallable."""
    directory = root / ".tools" / f"torchft-{VERSION}"
    stamp = directory / "installed"
    if not stamp.exists():
        print(f"installing torchft {VERSION} into {directory}", file=sys.stderr, flush=True)
        _pip(directory, *_REQUIREMENTS)
        # last, since pip replaces the bin directory of a target as a whole
        _pip(directory, "--no-deps", f"torchft=={VERSION}")
        stamp.touch()
    check = subprocess.run(
        [sys.executable, "-c", "import torchft"],
        env={**os.environ, "PYTHONPATH": str(directory)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    if check.returncode != 0:
        raise NotInstallable(f"torchft {VERSION} does not import: {check.stderr.strip().splitlines()[-1]}")
    return directory


def _pip(directory: Path, *what: str) -> None:
    words = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    try:
        done = subprocess.run(
            [*words, "--no-warn-conflicts", "--upgrade", "--target", str(directory), *what],
            capture_output=True,
            text=True,
            timeout=_PIP_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise NotInstallable(f"pip install {' '.join(what)} took longer than {_PIP_TIMEOUT_S:g} s") from error
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise NotInstallable(f"pip install {' '.join(what)}: {last}")
