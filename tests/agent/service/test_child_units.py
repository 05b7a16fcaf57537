"""A unit without systemd is found by the next daemon, whenever the one before was killed."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from bagua_agent.base.errors import InfrastructureLost
from bagua_agent.service.units.child_units import ChildUnits
from bagua_agent.service.units.units import REQUEST
from tests.lab.wait import HANG_S, eventually

DEADLINE_S = 30.0

# A daemon that is killed as soon as the process of its unit is there, before its next instruction.
KILLED_DAEMON = """
import os, subprocess, sys
from pathlib import Path
from bagua_agent.service.units import child_units

class Killed(subprocess.Popen):
    def __init__(self, *arguments, **keywords):
        super().__init__(*arguments, **keywords)
        print(self.pid, flush=True)
        os._exit(9)

subprocess.Popen = Killed
folders = Path(sys.argv[1])
child_units.ChildUnits(folders).start("job", folders / "job")
"""


@pytest.fixture
def folders(tmp_path: Path) -> Iterator[Path]:
    """With a unit that can be started: it waits for its request, which is never written."""
    (tmp_path / "job").mkdir()
    os.mkfifo(tmp_path / "job" / REQUEST)
    yield tmp_path
    runner = ChildUnits(tmp_path)
    eventually(lambda: over(runner), DEADLINE_S, "the unit is over")


def over(runner: ChildUnits) -> bool:
    alive = [unit for unit in runner.found() if unit.is_alive]
    for unit in alive:
        if unit.pid:
            runner.kill(unit.job_id)
    return not alive


def test_a_daemon_killed_before_its_next_instruction_leaves_a_unit_that_is_found(folders: Path) -> None:
    killed = subprocess.run(
        [sys.executable, "-c", KILLED_DAEMON, folders],
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
    )
    assert killed.returncode == 9, killed.stderr
    pid = int(killed.stdout)
    runner = ChildUnits(folders)
    (unit,) = runner.found()
    assert unit.is_alive, "its slots are taken"
    with pytest.raises(InfrastructureLost):
        runner.start("job", folders / "job")

    def recorded() -> bool:
        (unit,) = runner.found()
        assert unit.is_alive, "at no time it seems to be over"
        return unit.pid == pid

    eventually(recorded, DEADLINE_S, "the unit records itself")
    runner.kill("job")
    eventually(lambda: not runner.found()[0].is_alive, DEADLINE_S, "it is killed")
    runner.forget("job")
    assert runner.found() == []


def test_a_unit_is_known_to_its_daemon_from_the_start_on(folders: Path) -> None:
    runner = ChildUnits(folders)
    runner.start("job", folders / "job")
    (unit,) = runner.found()
    assert unit.is_alive and unit.pid
    runner.kill("job")
    eventually(lambda: not runner.found()[0].is_alive, DEADLINE_S, "it is killed")
    assert runner.found()[0].exit_code == 128 + 9


def test_a_daemon_killed_before_it_started_anything_leaves_nothing(folders: Path) -> None:
    runner = ChildUnits(folders)
    assert runner.found() == []
    runner.kill("job")
    runner.ask_to_leave("job")
