"""The image copies what exists, and the arguments in compose.yaml are taken. Dockerfile: scripts/check lints it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import yaml

from tests.deploy.parsed import parsed

ROOT = Path(__file__).parents[2]
DOCKER = ROOT / "deploy/docker"


def copied() -> list[str]:
    """What comes from the repository."""
    lines = (DOCKER / "Dockerfile").read_text().splitlines()
    return [line.split()[1] for line in lines if line.startswith("COPY ") and "--from" not in line]


def test_the_image_copies_what_exists() -> None:
    assert copied()
    assert all((ROOT / source).exists() for source in copied())


def test_the_build_reads_every_package_and_no_more_than_it_needs() -> None:
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    read = {line.removeprefix("!") for line in lines if line.startswith("!")}
    packages = {path.parent.name for path in ROOT.glob("bagua_*/__init__.py")}
    modules = {path.name for path in ROOT.glob("*.py")}
    declared = {"pyproject.toml", "README.md", "LICENSE", "protos"}
    assert "*" in lines and packages
    assert read == packages | modules | declared | {source for source in copied() if source != "."}


def test_what_compose_starts_is_in_the_image_and_taken() -> None:
    services = yaml.safe_load((DOCKER / "compose.yaml").read_text())["services"]
    trainer = services["trainer"]
    context = (DOCKER / trainer["build"]["context"]).resolve()
    assert context == ROOT and (context / trainer["build"]["dockerfile"]) == DOCKER / "Dockerfile"
    words = [re.sub(r"\$\{\w+:-(\w+)\}", r"\1", word) for word in trainer["command"]]
    config = parsed(words)
    assert config.shutdown_timeout_s < int(trainer["stop_grace_period"].removesuffix("s"))
    script = words[-1].removeprefix("/opt/bagua/")
    assert (ROOT / script).is_file() and script.split("/")[0] in copied()
    for service in trainer["depends_on"]:
        assert "healthcheck" in services[service]


def test_the_image_ends_in_an_agent_that_init_signals() -> None:
    lines = (DOCKER / "Dockerfile").read_text().splitlines()
    (entry,) = [line.removeprefix("ENTRYPOINT ") for line in lines if line.startswith("ENTRYPOINT ")]
    assert json.loads(entry) == ["tini", "--", "bagua-launch"]
    assert any("install" in line and "tini" in line.split() for line in lines)
