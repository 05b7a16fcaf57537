"""The agent's failpoints: what is read, what fires, and that it fires once."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from bagua_agent.base.errors import UserError
from bagua_agent.base.failpoints import VARIABLE, Failpoint, FailpointRaised, Failpoints, parse
from tests.lab.wait import HANG_S


def test_points_are_read() -> None:
    assert parse("") == ()
    assert parse("generation.before=stop@3; election.after=delay:0.5;agent-removal.before=kill") == (
        Failpoint("generation.before", "stop", 0.0, 3),
        Failpoint("election.after", "delay", 0.5, None),
        Failpoint("agent-removal.before", "kill", 0.0, None),
    )


@pytest.mark.parametrize(
    "text",
    [
        "generation=kill",
        "generation.before",
        "generation.before=explode",
        "election.before=kill:1",
        "election.before=delay",
        "result.after=stop@x",
        "nowhere.before=kill",
    ],
)
def test_what_is_no_failpoint_is_named(text: str) -> None:
    with pytest.raises(UserError, match=r"is no failpoint; names are agent-removal\.after"):
        parse(text)


def test_each_fires_once_and_only_for_its_generation(capfd: pytest.CaptureFixture[str]) -> None:
    points = Failpoints.from_environment({VARIABLE: "generation.before=raise@2;generation.before=raise"})
    points.reach("generation.after", 2)
    with pytest.raises(FailpointRaised):
        points.reach("generation.before", 2)
    with pytest.raises(FailpointRaised):
        points.reach("generation.before", 2)
    points.reach("generation.before", 2)
    said = capfd.readouterr().err.splitlines()
    assert said == ["bagua agent failpoint generation.before fired: raise at generation 2"] * 2


def test_without_the_variable_nothing_is_set() -> None:
    Failpoints.from_environment({}).reach("generation.before", 1)


def test_it_kills_itself() -> None:
    script = (
        "from bagua_agent.base.failpoints import Failpoints\n"
        "Failpoints.from_environment().reach('result.before')\n"
        "print('lived on')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={VARIABLE: "result.before=kill", "PYTHONPATH": ":".join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
    )
    assert done.returncode == -signal.SIGKILL and "lived on" not in done.stdout
    assert "bagua agent failpoint result.before fired: kill at generation 0" in done.stderr
