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
    assert citation["license"] == "Apache-2.0"
    assert PROJECT["license"] == "Apache-2.0 AND MIT", "a library of the dashboard is MIT's"
    assert "Apache License" in (ROOT / "LICENSE").read_text()
    assert f"## {PROJECT['version']}" in (ROOT / "CHANGELOG.md").read_text()
    assert f"| {PROJECT['version'].rpartition('.')[0]}.x | yes |" in (ROOT / "SECURITY.md").read_text()


def test_the_readme_names_the_version_and_links_licence_and_changelog() -> None:
    readme = (ROOT / "README.md").read_text()
    assert re.findall(r"^Version ([\d.]+\d)\b", readme, re.MULTILINE) == [PROJECT["version"]]
    released = f"## {PROJECT['version']} (unreleased)" not in (ROOT / "CHANGELOG.md").read_text()
    assert ("not released yet" in readme) != released
    for name in (
        "LICENSE",
        "CHANGELOG.md",
        "SECURITY.md",
        "CONTRIBUTING.md",
        "CODE_OF_CONDUCT.md",
        "CITATION.cff",
    ):
        assert f"]({name})" in readme, name


def test_the_package_has_the_licence_of_everything_in_it() -> None:
    licences = {str(path.relative_to(ROOT)) for path in (ROOT / "bagua_agent").rglob("*LICENSE*")}
    assert {"LICENSE", *licences} == set(PROJECT["license-files"]) and len(licences) == 1
    assert all((ROOT / name).is_file() for name in PROJECT["license-files"])


def test_the_classifiers_name_each_python_that_a_wheel_is_built_for() -> None:
    release = (ROOT / ".github/workflows/release.yml").read_text()
    built = {f"3.{minor}" for minor in re.findall(r"cp3(\d+)-manylinux", release)}
    classifiers = PROJECT["classifiers"]
    named = {
        c.rpartition(" ")[2]
        for c in classifiers
        if re.fullmatch(r"Programming Language :: Python :: 3\.\d+", c)
    }
    assert built == named and f">={min(named)}" == PROJECT["requires-python"]
    # a licence is an expression; the index refuses a classifier beside it
    assert not [c for c in classifiers if c.startswith("License ::")]
    assert len(set(classifiers)) == len(classifiers)


def test_the_package_says_what_it_is() -> None:
    assert PROJECT["readme"] == "README.md" and PROJECT["authors"]
    assert "PyTorch" in PROJECT["description"] and len(PROJECT["description"]) <= 512
    assert PROJECT["keywords"] == sorted(set(PROJECT["keywords"]), key=str.lower)


def test_the_metadata_has_addresses_once_there_are_some() -> None:
    contributing = " ".join((ROOT / "CONTRIBUTING.md").read_text().split())
    without = "The project has no public address yet, so the package's metadata name none" in contributing
    assert without == ("urls" not in PROJECT)
    relative = re.findall(r"\]\((?!https?:|#)[^)]+\)", (ROOT / PROJECT["readme"]).read_text())
    assert without == bool(relative), "on a package index they lead nowhere"


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
    for name, job in workflow["jobs"].items():
        assert job["timeout-minutes"] <= (300 if name == "long" else 60)
    for step in steps(workflow):
        assert ("uses" in step) != ("run" in step)
        for script in re.findall(
            r"(?:^|\s)(scripts/\w+|(?:repository/)?examples/\w+\.py)", step.get("run", "")
        ):
            assert (ROOT / script.removeprefix("repository/")).is_file(), script
    for job in workflow["jobs"].values():
        needed = job.get("needs", [])
        assert set([needed] if isinstance(needed, str) else needed) <= set(workflow["jobs"])
