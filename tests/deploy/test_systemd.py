"""The units of deploy/systemd bound what their services may take."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from bagua_agent.service.units.systemd_units import PROPERTIES
from tests.lab.wait import HANG_S

UNITS = Path(__file__).parents[2] / "deploy/systemd"


def settings(text: str) -> dict[str, str]:
    lines = [line for line in text.splitlines() if "=" in line and not line.startswith("#")]
    return dict(line.split("=", 1) for line in lines)


@pytest.mark.parametrize("unit", sorted(UNITS.glob("*.service")), ids=lambda path: path.stem)
def test_memory_and_tasks_are_bounded(unit: Path) -> None:
    found = settings(unit.read_text())
    assert found["MemoryMax"].removesuffix("G").isdigit() and found["MemoryMax"].endswith("G")
    assert found["TasksMax"].isdigit()
    assert found["Restart"] == "always", "what was ended for its memory comes back"
    assert int(found["OOMScoreAdjust"]) < 0, "a job's process goes before it"


@pytest.mark.parametrize("unit", sorted(UNITS.glob("*.service")), ids=lambda path: path.stem)
def test_a_service_is_started_again_however_often_it_fails(unit: Path) -> None:
    """By default systemd gives up after five starts within ten seconds, and a cause that passes by itself, such as a
    driver that is loaded later, would cost a node for good."""
    section, _, after = unit.read_text().partition("\n[Service]\n")
    assert "\nStartLimitIntervalSec=0\n" in section + "\n", "a setting of [Unit]"
    assert settings(after)["RestartSec"] == "5", "a cause that stays does not fill the journal"


def test_the_daemon_reaches_the_gpus_that_it_checks() -> None:
    """Each of these settings denies the unit all devices that it does not list. ProtectClock lists /dev/rtc, and before
    systemd 253 denied all others with it."""
    found = settings((UNITS / "bagua-agent.service").read_text())
    harmless = {"ProtectClock": "no", "PrivateDevices": "no", "DevicePolicy": "auto", "DeviceAllow": ""}
    assert {name: found[name] for name in harmless if found.get(name, harmless[name]) != harmless[name]} == {}
    assert (
        found["CapabilityBoundingSet"].startswith("~CAP_SYS_TIME") and "@clock" in found["SystemCallFilter"]
    )


def test_jobs_together_leave_tasks_to_the_daemon() -> None:
    of_all = settings((UNITS / "bagua.slice").read_text())["TasksMax"]
    of_one = settings("\n".join(PROPERTIES))["TasksMax"]
    assert of_one == "80%" and of_all == "90%"


@pytest.mark.skipif(
    shutil.which("systemd-analyze") is None, reason="no systemd-analyze; install Debian's systemd"
)
def test_systemd_reads_the_slice() -> None:
    line = ["systemd-analyze", "verify", str(UNITS / "bagua.slice")]
    done = subprocess.run(line, capture_output=True, text=True, timeout=HANG_S, check=False)
    assert "bagua.slice" not in done.stderr, done.stderr


def test_there_are_units() -> None:
    assert {unit.stem for unit in UNITS.glob("*.service")} == {"bagua-agent", "bagua-etcd"}


def test_steps_of_etcd_name_every_file_that_its_unit_reads() -> None:
    page = (UNITS.parent / "README.md").read_text()
    steps = page.partition("\n## systemd\n")[2].partition("\n## ")[0]
    named = set(re.findall(r"`([^`\s]+)`", steps))
    read = set(re.findall(r"(/etc/bagua/[\w./-]+\w)", (UNITS / "bagua-etcd.service").read_text()))
    files = {path for path in map(Path, read) if path.suffix}
    assert {path.name for path in files} == {
        "etcd.env",
        "ca.pem",
        "certificate.pem",
        "key.pem",
        "revoked.pem",
    }
    assert [str(path) for path in files if not {path.name, str(path.parent)} <= named] == []
