"""A unit outlives its daemon, is found again, leaves, is killed whole: as a process, and under a real systemd."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bagua_agent.base.errors import UserError
from bagua_agent.config.job_config import CommandKind, JobConfig, WorkerCommand
from bagua_agent.service.service_unit import SLICE_TEXT
from bagua_agent.service.units.systemd_units import (
    PREFIX,
    PROPERTIES,
    SystemdUnits,
    name_of,
    properties,
    read_unit,
)
from bagua_agent.service.units.units import FoundUnit, UnitFolders, UnitNote, UnitRequest, read_request
from tests.lab import machine
from tests.lab.fixtures import MakeLab, make_lab
from tests.lab.machine import ROOT, Machine
from tests.lab.wait import HANG_S

__all__ = ["make_lab"]

SCENARIO = Path(__file__).with_name("unit_scenario.py")
ENVIRONMENT = {"PYTHONPATH": f"{ROOT}:{ROOT / 'protos'}", "TMPDIR": "/tmp"}


def check(told: dict[str, object]) -> None:
    assert told["none"] == [] and told["at the end"] == []
    assert told["environment"] == f"a secret {told['place']}"
    assert told["found"] == [["killed", True, True], ["leaves", True, True]]
    assert told["note"] == {
        "order": 7,
        "slots": [0],
        "failures": 2,
        "shutdown_timeout_s": 30.0,
        "nonce": "n1",
        "started_unix_s": 1e9,
    }
    assert told["folder"] == "0o700" and told["command lines"] == [False, False]
    assert told["left with"] == 128 + 15, "the only node of a job was told to go"
    assert told["killed with"] == 128 + 9
    assert told["failed with"] == 1 and told["without a directory"] == 2


OLD_SYSTEMCTL = """#!/bin/sh
for word in "$@"; do
    case $word in
    --kill-who=main | --signal=*) ;;
    -*) echo "systemctl: unrecognized option '$word'" >&2; exit 1 ;;
    esac
done
echo "$@" >>"$0.calls"
"""


def test_systemd_before_252_takes_the_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ubuntu 22.04 has 249, Debian 11 has 247: they know no --kill-whom."""
    program = tmp_path / "systemctl"
    program.write_text(OLD_SYSTEMCTL)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    SystemdUnits().ask_to_leave("one")
    SystemdUnits().kill("one")
    asked, killed = (tmp_path / "systemctl.calls").read_text().splitlines()
    assert asked == f"kill --kill-who=main --signal=SIGTERM {name_of('one')}"
    assert killed == f"kill --signal=SIGKILL {name_of('one')}"


def test_processes(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, SCENARIO, "child", tmp_path],
        env={**os.environ, **ENVIRONMENT}, capture_output=True, text=True, timeout=HANG_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    check({**json.loads(done.stdout), "place": str(tmp_path)})


def test_systemd(make_lab: MakeLab) -> None:
    if reason := machine.unavailable():
        pytest.skip(reason)
    booted = Machine(make_lab(1).hosts[0])
    try:
        booted.boot()
        booted.run(["mkdir", "-m", "755", "/srv/place"])
        env = {**ENVIRONMENT, "BAGUA_LAB": "1"}
        done = booted.run([sys.executable, SCENARIO, "systemd", "/srv/place"], env=env, timeout_s=180)
        told = {**json.loads(done.stdout), "place": "/srv/place"}
        check(told)
        assert told["memory"] == str(8 << 30)
        assert told["escaped after leaving"] is told["escaped after killing"] is False, (
            "a control group ends whole"
        )
        assert booted.processes("bagua.slice") == []
    finally:
        booted.close()


def test_the_memory_of_a_job_is_limited_only_if_the_node_says_so() -> None:
    assert not any(p.startswith("Memory") for p in properties("", 60.0))
    assert "TasksMax=80%" in PROPERTIES, "the daemon needs threads while a job forks without end"
    assert properties("64G", 60.0) == (*properties("", 60.0), "MemoryMax=64G")


def test_a_shutdown_of_the_host_asks_the_agent_alone_and_gives_it_the_jobs_time() -> None:
    assert "KillMode=mixed" in PROPERTIES, "its workers leave at a step boundary, as the agent says"
    assert properties("", 60.5) == (*PROPERTIES, "TimeoutStopSec=61")
    assert properties("", 0.0) == (*PROPERTIES, "TimeoutStopSec=1"), "0 is no limit to systemd"
    after = next(line for line in SLICE_TEXT.splitlines() if line.startswith("After="))
    assert after == "After=network-online.target remote-fs.target bagua-etcd.service", (
        "which end after the jobs"
    )


def test_the_time_of_a_shutdown_is_the_jobs_own_and_the_nodes_grace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("systemctl", "systemd-run"):
        program = tmp_path / name
        program.write_text('#!/bin/sh\necho "$@" >>"$0.calls"\n')
        program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    config = JobConfig("j", WorkerCommand(CommandKind.SCRIPT, "train.py"))
    folders = UnitFolders(tmp_path / "units")
    folder = folders.make(UnitRequest(config, {}, "/"), UnitNote(shutdown_timeout_s=600.0))
    SystemdUnits("", 5.0).start("j", folder)
    assert "-p TimeoutStopSec=605 " in (tmp_path / "systemd-run.calls").read_text()


@pytest.mark.parametrize(
    ("shown", "unit"),
    [
        ({"Id": "sshd.service", "ActiveState": "active"}, None),
        ({"ActiveState": "inactive", "ExecMainPID": "0"}, None),
        ({"ActiveState": "active", "SubState": "running", "MainPID": "12"}, FoundUnit("j", 12, None)),
        ({"ActiveState": "activating", "SubState": "start", "MainPID": "0"}, FoundUnit("j", 0, None)),
        ({"ActiveState": "active", "SubState": "exited", "ExecMainCode": "1", "ExecMainStatus": "0"},
         FoundUnit("j", 0, 0)),
        ({"ActiveState": "failed", "ExecMainCode": "1", "ExecMainStatus": "3"}, FoundUnit("j", 0, 3)),
        ({"ActiveState": "failed", "ExecMainCode": "2", "ExecMainStatus": "9"}, FoundUnit("j", 0, 137)),
        ({"ActiveState": "failed", "ExecMainCode": "3", "ExecMainStatus": "11"}, FoundUnit("j", 0, 139)),
        ({"ActiveState": "failed", "ExecMainCode": "0", "ExecMainStatus": "0"}, FoundUnit("j", 0, 137)),
    ],
)  # fmt: skip
def test_what_systemd_shows(shown: dict[str, str], unit: FoundUnit | None) -> None:
    assert read_unit({"Id": f"{PREFIX}j.service", **shown}) == unit


def test_names_and_contents_that_climb_out_are_refused(tmp_path: Path) -> None:
    folders = UnitFolders(tmp_path / "units")
    for name in ("..", "a/b", "", "x" * 200, "a\n"):
        with pytest.raises(UserError, match="is not allowed"):
            folders.of(name)
    folder = folders.of("j")
    folder.mkdir()
    for text in ("", "{}", "[]", '{"config": "{}", "environment": {}, "directory": "/"}'):
        (folder / "request.json").write_text(text)
        with pytest.raises(UserError):
            read_request(folder)
    assert folders.note("j") == UnitNote()
