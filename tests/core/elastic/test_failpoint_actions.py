"""Failpoints are read strictly and do what they say, once, where and when they are set."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from bagua_core.elastic import failpoints as module
from bagua_core.elastic.failpoints import POINTS, Failpoint, FailpointRaised, Failpoints, parse
from tests.lab.wait import HANG_S

CORE = Path(module.__file__).parents[1]


@pytest.mark.parametrize(
    ("text", "points"),
    [
        ("", ()),
        (" ; ;", ()),
        ("commit.after=kill", (Failpoint("commit.after", "kill", 0.0, None, None),)),
        ("step.begin=exit:3@7#1", (Failpoint("step.begin", "exit", 3.0, 7, 1),)),
        ("step.begin=kill@0#0", (Failpoint("step.begin", "kill", 0.0, 0, 0),)),
        (
            "heal.send=sleep:0.25; heal.swap=raise#2",
            (
                Failpoint("heal.send", "sleep", 0.25, None, None),
                Failpoint("heal.swap", "raise", 0.0, None, 2),
            ),
        ),
    ],
)
def test_what_is_written_is_read(text: str, points: tuple[Failpoint, ...]) -> None:
    assert parse(text) == points


@pytest.mark.parametrize(
    "part",
    [
        "commit.after",
        "commit.after=",
        "commit.after=explode",
        "commit.middle=kill",
        "commit.after=kill@",
        "commit.after=kill@-1",
        "commit.after=kill#x",
        "commit.after=kill#1@2",  # the slot comes last
        "step.begin=sleep:1.2.3",
        "step.begin=sleep:.",
        "step.begin=exit",  # with which code?
        "step.begin=sleep",  # how long?
        "step.begin=exit:1.5",
        "=kill",
    ],
)
def test_what_is_no_failpoint_is_named(part: str) -> None:
    with pytest.raises(ValueError, match="is no failpoint") as caught:
        parse(f"step.begin=kill;{part}")
    assert repr(part) in str(caught.value)


def test_every_point_is_reached_somewhere_and_no_other() -> None:
    sources = "".join(p.read_text() for p in CORE.rglob("*.py") if p.name != "failpoints.py")
    assert set(re.findall(r'reach\("([^"]+)"', sources)) == POINTS


def test_a_point_fires_once() -> None:
    points = Failpoints("step.begin=raise")
    with pytest.raises(FailpointRaised, match=r"step\.begin at step 4"):
        points.reach("step.begin", 4)
    points.reach("step.begin", 4)
    points.reach("step.begin", 5)


def test_a_point_fires_at_its_step_in_its_slot_at_its_place() -> None:
    text = "step.begin=raise@2#1"
    elsewhere = Failpoints(text, slot=0)
    here = Failpoints(text, slot=1)
    for step in range(5):
        elsewhere.reach("step.begin", step)
        here.reach("commit.after", step)
        if step == 2:
            with pytest.raises(FailpointRaised):
                here.reach("step.begin", step)
        else:
            here.reach("step.begin", step)


def test_two_points_of_one_name_each_fire() -> None:
    points = Failpoints("step.begin=raise@1;step.begin=raise@3")
    fired = []
    for step in range(5):
        try:
            points.reach("step.begin", step)
        except FailpointRaised:
            fired.append(step)
    assert fired == [1, 3]


def test_a_firing_is_printed(capfd: pytest.CaptureFixture[str]) -> None:
    Failpoints("heal.send=sleep:0.001").reach("heal.send", 9)
    assert capfd.readouterr().err == "bagua failpoint heal.send fired: sleep at step 9\n"


# By the file alone: a process that imports the package imports torch, and this is about processes.
PROGRAM = """
import importlib.util, sys
spec = importlib.util.spec_from_file_location("failpoints", sys.argv[1])
module = importlib.util.module_from_spec(spec)
sys.modules["failpoints"] = module
spec.loader.exec_module(module)
module.Failpoints(sys.argv[2]).reach("step.begin", 1)
print("went on")
"""


def start(text: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, module.__file__, text],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize(
    ("action", "returncode", "goes_on"),
    [("kill", -signal.SIGKILL, False), ("exit:7", 7, False), ("raise", 1, False), ("sleep:0.01", 0, True)],
)
def test_what_a_point_does_to_its_process(action: str, returncode: int, goes_on: bool) -> None:
    out, err = (process := start(f"step.begin={action}")).communicate(timeout=HANG_S)
    assert process.returncode == returncode, err
    assert out == ("went on\n" if goes_on else "")
    assert f"bagua failpoint step.begin fired: {action.partition(':')[0]} at step 1" in err
    assert ("FailpointRaised" in err) == (action == "raise")


def test_a_stopped_process_stands_still_until_it_is_continued() -> None:
    process = start("step.begin=stop")
    try:
        found = os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
        assert found is not None and found.si_code == os.CLD_STOPPED
        os.kill(process.pid, signal.SIGCONT)
        out, _ = process.communicate(timeout=HANG_S)
        assert (process.returncode, out) == (0, "went on\n")
    finally:
        process.kill()
        process.communicate(timeout=HANG_S)
