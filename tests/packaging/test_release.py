"""The release workflow's own commands build and check what it publishes.

They run as GitHub runs them, in a fresh environment and without a checkout's packages. `pip wheel` is in the place of
cibuildwheel, which needs Docker; the publishing step is an action and does not run here.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
import venv
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.packaging.tracked_copy import ROOT, copy_tracked

pytestmark = pytest.mark.long
STEP_S = 1200  # torch is installed
JOBS: dict[str, Any] = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text())["jobs"]
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
CIBUILDWHEEL = "python -m cibuildwheel --output-dir wheels source"
OF_WORKFLOW, OF_THIS_PYTHON = "cp311", f"cp{sys.version_info.major}{sys.version_info.minor}"


def scripts(job: str) -> list[str]:
    """What the steps of a job run, in their order."""
    return [step["run"] for step in JOBS[job]["steps"] if "run" in step]


def ended(
    script: str, folder: Path, python: Path, tag: str = f"v{VERSION}"
) -> subprocess.CompletedProcess[str]:
    """Runs a step's script in `folder` by `bash -e`, as GitHub does. python: the folder of its python."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "BAGUA_", "PET_"))}
    own = {"PATH": f"{python}:{clean['PATH']}", "GITHUB_REF_NAME": tag}
    constraints = {"PIP_CONSTRAINT": str(ROOT / "tests/constraints.txt")}  # torch's build for CPUs
    return subprocess.run(
        ["bash", "-e", "-c", script],
        cwd=folder,
        env={**clean, **constraints, **own},
        capture_output=True,
        text=True,
        timeout=STEP_S,
        check=False,
    )


def run(script: str, folder: Path, python: Path) -> None:
    done = ended(script, folder, python)
    assert done.returncode == 0, f"{script}\n{done.stdout}\n{done.stderr}"


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("environment")
    venv.create(home, with_pip=True)
    return home / "bin"


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory, python: Path) -> Path:
    """A copy of the working tree in which the job `source` has run."""
    folder = tmp_path_factory.mktemp("repository")
    copy_tracked(folder)
    for script in scripts("source"):
        run(script, folder, python)
    return folder


def test_the_source_distribution_is_built_and_passes_the_check(built: Path) -> None:
    assert [path.name for path in (built / "dist").iterdir()] == [f"bagua_elastic-{VERSION}.tar.gz"]


def test_a_tag_of_another_version_is_refused(built: Path, python: Path) -> None:
    (script,) = [script for script in scripts("source") if "GITHUB_REF_NAME" in script]
    done = ended(script, built, python, tag=f"v{VERSION}.1")
    assert done.returncode == 1 and f"the tag v{VERSION}.1 is not v{VERSION}" in done.stderr


def test_a_wheel_of_the_source_distribution_passes_the_check_and_runs_a_job(
    built: Path, python: Path, tmp_path: Path
) -> None:
    (tmp_path / "dist").symlink_to(built / "dist")
    (tmp_path / "repository").symlink_to(built)
    of_wheels = scripts("wheels")
    assert CIBUILDWHEEL in of_wheels
    for script in of_wheels:
        mine = script.replace(CIBUILDWHEEL, "python -m pip wheel --no-deps --wheel-dir wheels ./source")
        run(re.sub(OF_WORKFLOW, OF_THIS_PYTHON, mine), tmp_path, python)
    (wheel,) = (tmp_path / "wheels").iterdir()
    assert OF_THIS_PYTHON in wheel.name
