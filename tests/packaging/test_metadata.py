"""The files about the project agree with each other, and its workflows run what exists."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

import bagua_core

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))


def test_all_files_name_one_version_and_licence() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert PROJECT["version"] == bagua_core.__version__ == str(citation["version"])
    assert PROJECT["license"] == citation["license"] == "Apache-2.0"
    assert "Apache License" in (ROOT / "LICENSE").read_text()
    assert f"## {PROJECT['version']}" in (ROOT / "CHANGELOG.md").read_text()
    assert f"| {PROJECT['version'].rpartition('.')[0]}.x | yes |" in (ROOT / "SECURITY.md").read_text()


def test_every_entry_point_leads_to_a_function() -> None:
    points = {**PROJECT["scripts"], **PROJECT["entry-points"]["torchrun.handlers"]}
    for target in points.values():
        module, _, function = target.partition(":")
        source = (ROOT / f"{module.replace('.', '/')}.py").read_text()
        assert f"def {function}(" in source, target


def steps(workflow: dict[str, Any]) -> list[dict[str, Any]]:
    return [step for job in workflow["jobs"].values() for step in job["steps"]]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_a_workflow_is_bounded_and_runs_scripts_that_exist(path: Path) -> None:
    workflow = yaml.safe_load(path.read_text())
    assert workflow["permissions"] == {"contents": "read"}  # a job that needs more asks for it
    assert all(job["timeout-minutes"] <= 60 for job in workflow["jobs"].values())
    for step in steps(workflow):
        assert ("uses" in step) != ("run" in step)
        for script in re.findall(
            r"(?:^|\s)(scripts/\w+|(?:repository/)?examples/\w+\.py)", step.get("run", "")
        ):
            assert (ROOT / script.removeprefix("repository/")).is_file(), script
    for job in workflow["jobs"].values():
        needed = job.get("needs", [])
        assert set([needed] if isinstance(needed, str) else needed) <= set(workflow["jobs"])
