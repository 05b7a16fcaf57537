"""scripts/check_resolution where the package index does not answer, and where a requirement is wrong."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
UV = Path(sys.executable).with_name("uv")
RUN_S = 180

pytestmark = pytest.mark.skipif(not UV.exists(), reason="scripts/check installs uv, scripts/test does not")


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Its environment has uv alone."""
    for name in ("pyproject.toml", "tests/constraints.txt", "scripts/check_resolution"):
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "scripts" / "environment.sh").write_text("bagua_environment() { :; }\n")
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / ".venv" / "bin" / "uv").symlink_to(UV)
    return tmp_path


def check(checkout: Path, index: str) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("UV_", "PIP_"))}
    environment |= {"UV_DEFAULT_INDEX": index, "UV_CACHE_DIR": str(checkout / "cache")}
    return subprocess.run(
        [checkout / "scripts" / "check_resolution"],
        env=environment, capture_output=True, text=True, timeout=RUN_S, check=False,
    )  # fmt: skip


def test_an_index_that_does_not_answer_is_a_skip_with_a_reason(checkout: Path) -> None:
    with socket.socket() as taken:  # bound, and nothing listens
        taken.bind(("127.0.0.1", 0))
        done = check(checkout, f"http://127.0.0.1:{taken.getsockname()[1]}/simple")
    assert done.returncode == 75, done.stdout + done.stderr
    assert done.stdout.count("not checked: the package index did not answer") == 2, (
        "two requests in vain are enough"
    )
    assert "Connection refused" in done.stdout
    assert "0 combinations checked, 23 skipped" in done.stdout
    assert done.stderr.startswith(
        "SKIPPED: 23 of 23 combinations: the package index did not answer; run scripts/"
    )


def test_an_error_that_is_not_the_indexs_is_a_failure(checkout: Path) -> None:
    project = checkout / "pyproject.toml"
    project.write_text(project.read_text().replace('"bagua-elastic"', '"no valid name"'))
    done = check(checkout, "http://127.0.0.1:9/simple")
    assert done.returncode == 1 and "no valid name" in done.stdout and "SKIPPED" not in done.stderr
    assert "does not resolve:" in done.stdout and "23 combinations checked, 0 skipped" in done.stdout, (
        done.stdout
    )
