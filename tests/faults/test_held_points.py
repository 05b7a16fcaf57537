"""The failpoints' action `hold`: a worker or agent that is asked for stays at its point until it is released."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest

from bagua_agent.base import failpoints as of_agent
from bagua_core.elastic import failpoints as of_worker
from tests.lab.wait import eventually

DEADLINE_S = 20.0


@dataclass
class Passer:
    """A thread that passes a point once; `ended` says how."""

    reach: Callable[[], None]
    ended: str = ""

    def __post_init__(self) -> None:
        self.thread = threading.Thread(target=self._pass)
        self.thread.start()

    def _pass(self) -> None:
        try:
            self.reach()
        except (of_worker.FailpointRaised, of_agent.FailpointRaised) as error:
            self.ended = str(error)
        else:
            self.ended = "went on"

    def outcome(self) -> str:
        self.thread.join(DEADLINE_S)
        return self.ended


@dataclass(frozen=True)
class Point:
    """One that holds each process that passes it, if `directory` asks for it."""

    module: ModuleType
    name: str
    directory: Path
    passes: Callable[[], None]

    def ask(self) -> None:
        (self.directory / self.name).touch()

    @property
    def standing(self) -> Path:
        return self.directory / f"{self.name}.{os.getpid()}"

    def await_standing(self) -> None:
        eventually(self.standing.exists, DEADLINE_S, "a process is held there")


@pytest.fixture(params=["worker", "agent"])
def point(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Point]:
    module, name = (of_worker, "heal.send") if request.param == "worker" else (of_agent, "election.before")
    points = module.Failpoints(f"{name}=hold:{tmp_path}")
    yield Point(module, name, tmp_path, lambda: points.reach(name, 7))


def test_who_is_not_asked_for_passes(point: Point, capfd: pytest.CaptureFixture[str]) -> None:
    point.passes()
    assert capfd.readouterr().err == ""


def test_one_stands_until_it_is_let_go_and_the_next_passes(
    point: Point, capfd: pytest.CaptureFixture[str]
) -> None:
    for _ in range(2):  # as often as asked for
        point.ask()
        passer = Passer(point.passes)
        point.await_standing()
        assert not (point.directory / point.name).exists(), "one alone is asked for"
        point.passes()  # another
        assert passer.thread.is_alive()
        point.standing.unlink()
        assert passer.outcome() == "went on"
    said = capfd.readouterr().err.splitlines()
    assert len(said) == 2 and all(f"failpoint {point.name} fired: hold at" in line for line in said)


def test_one_that_stands_there_may_raise(point: Point) -> None:
    point.ask()
    passer = Passer(point.passes)
    point.await_standing()
    point.standing.write_text("raise")
    assert passer.outcome().startswith(f"failpoint {point.name} at ")


def test_no_process_is_held_forever(
    point: Point, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(point.module, "HOLD_LIMIT_S", 0.02)
    point.ask()
    point.passes()
    assert "no test let go within 0.02 s" in capfd.readouterr().err


@pytest.mark.parametrize("text", ["{}=hold", "{}=hold:", "{}=hold:relative", "{}=hold:/a;b"])
def test_where_to_ask_is_said(point: Point, text: str) -> None:
    with pytest.raises(Exception, match="is no failpoint"):
        point.module.parse(text.format(point.name))


def test_a_hold_may_be_of_one_step_and_slot() -> None:
    worker = of_worker.parse("step.begin=hold:/tmp/holds@3#1")
    assert worker == (of_worker.Failpoint("step.begin", "hold", 0.0, 3, 1, "/tmp/holds"),)
    agent = of_agent.parse("result.after=hold:/tmp/holds@2")
    assert agent == (of_agent.Failpoint("result.after", "hold", 0.0, 2, "/tmp/holds"),)
