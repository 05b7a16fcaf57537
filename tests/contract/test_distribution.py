"""The original Bagua in the same environment is named wherever people look."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from bagua_agent.service.node.node_checks import Weight, judge_packages
from bagua_contract.distribution import DISTRIBUTION, original_beside, own_version
from tests.lab.wait import HANG_S

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(params=["bagua_core-0.4.1", "bagua-0.9.2", "bagua_cuda116-0.9.2"])
def original(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A folder on the path in which that distribution's metadata lies."""
    name, _, version = request.param.rpartition("-")
    folder = tmp_path / f"{request.param}.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: {version}\n"
    )
    return tmp_path


def said(code: str, path: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True, text=True, timeout=HANG_S, check=True, cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(path), str(ROOT / "protos")])},
    )  # fmt: skip
    return done.stdout + done.stderr


def test_importing_the_core_warns(original: Path) -> None:
    found = said("import bagua_core", original)
    assert (
        f"(the original Bagua) is installed beside {DISTRIBUTION}" in found and "pip uninstall bagua" in found
    )


def test_a_node_check_calls_it_trouble(original: Path) -> None:
    code = "from bagua_contract.distribution import original_beside as o; print(o())"
    told = said(code, original).strip()
    [finding] = judge_packages(told)
    assert finding.weight is Weight.TROUBLE and "both own the module bagua_core" in finding.text


def test_this_environment_has_ours_alone() -> None:
    assert own_version() is not None
    assert original_beside() is None and judge_packages(original_beside()) == []
