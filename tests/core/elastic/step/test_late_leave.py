"""The thread that leaves in the script's place, over a real session: its reports, its checkpoint and its interrupts."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from bagua_contract import membership_pb2, session_pb2
from bagua_core.elastic.membership.session import Session
from bagua_core.elastic.state.state_guard import StateGuard
from bagua_core.elastic.step.late_leave import EXIT_CODE, LateLeave
from bagua_core.elastic.step.late_leave_plan import Form, LeaveSituation
from bagua_core.elastic.step.step_states import Phase
from bagua_core.errors import LeaveInterrupt
from tests.core.communication.worlds import await_true
from tests.core.elastic.agents import Agent

EVALUATING = LeaveSituation(0.0, 0.0, phase=Phase.FINAL, parts=1, most_parts=1)


def no_thread() -> bool:
    return not any(t.name == "bagua-late-leave" for t in threading.enumerate())


class Engine:
    """One that takes notes."""

    generation_number = 7

    def __init__(self) -> None:
        self.situation = EVALUATING
        self.written: list[Form] = []
        self.problems: list[str] = []
        self.fails: Exception | None = None
        self.is_unclear = False
        self.looks = 0

    def late_situation(self, left_s: float) -> tuple[LeaveSituation, bool]:
        self.looks += 1
        if self.is_unclear:
            raise RuntimeError("dictionary changed size during iteration")
        return replace(self.situation, left_s=left_s), False

    def begin_last_write(self, form: Form, leave_by_s: float) -> None:
        if self.fails is not None:
            raise self.fails
        self.written.append(form)

    def end_last_write(self, leave_by_s: float, problem: str) -> membership_pb2.LastCheckpoint:
        self.problems.append(problem)
        return membership_pb2.LastCheckpoint(part=0, parts=1, written=not problem, problem=problem)

    def without_write(self) -> membership_pb2.LastCheckpoint | None:
        return membership_pb2.LastCheckpoint()


class World:
    def __init__(self, agent: Agent) -> None:
        self.agent = agent
        self.engine = Engine()
        self.guard = StateGuard()
        self.interrupts = threading.Event()
        self.ended: list[int] = []
        self.session = Session(agent.socket, "w0", threading.Condition())
        self.late = LateLeave(
            self.engine, self.guard, self.session, interrupt=self.interrupts.set, end=self.ended.append
        )

    def leave(self, within_s: float) -> None:
        self.agent.server.tell_leave(within_s)

    @property
    def told(self) -> list[session_pb2.Left]:
        return [m.left for m in self.agent.said_by("w0") if m.WhichOneof("kind") == "left"]


@pytest.fixture
def world() -> Iterator[World]:
    agent = Agent("w0", slots=1)
    made = World(agent)
    usual_s = sys.getswitchinterval()
    yield made
    made.late.close()
    await_true(no_thread, "no thread is left")
    assert sys.getswitchinterval() == usual_s
    made.session.close()
    agent.close()


def test_the_state_is_saved_before_the_script_is_interrupted(world: World) -> None:
    world.leave(1.0)
    await_true(world.interrupts.is_set, "the script is interrupted")
    assert world.engine.written == [Form.AFTER_COMMIT] and world.engine.problems == [""]
    await_true(lambda: bool(world.told), "the agent is told")
    assert world.told[0].last.written and world.told[0].generation == 7
    with pytest.raises(LeaveInterrupt), world.guard.held():
        pytest.fail("nothing of the state changes any more")


def test_before_the_first_step_the_agent_is_told_at_once_that_nothing_is_held(world: World) -> None:
    world.engine.situation = replace(EVALUATING, committed=False)
    world.leave(600.0)
    await_true(world.interrupts.is_set, "the script is interrupted")
    await_true(lambda: bool(world.told), "the agent is told")
    assert world.told[0].HasField("last") and not world.told[0].last.HasField("state")
    assert not world.engine.written


def test_a_script_that_reaches_its_boundary_leaves_by_itself(world: World) -> None:
    world.engine.situation = replace(EVALUATING, over=True)
    world.leave(0.2)
    await_true(no_thread, "no thread is left")
    assert not world.interrupts.is_set() and not world.told


def test_without_a_limit_the_boundary_is_waited_for(world: World) -> None:
    world.engine.situation = replace(EVALUATING, committed=False)
    world.leave(0.0)
    await_true(lambda: world.session.news.leave, "the leave is asked")
    assert no_thread()


def test_an_optimizer_that_does_not_end_is_said_and_nothing_is_saved(world: World) -> None:
    world.engine.situation = replace(EVALUATING, stepping=True)
    world.leave(0.5)
    await_true(world.interrupts.is_set, "the script is interrupted")
    assert not world.engine.written
    assert world.engine.problems == ["an optimizer is changing the parameters"]


@pytest.mark.parametrize("error", [RuntimeError("dictionary changed size"), OSError("no space")])
def test_a_capture_that_fails_is_said(world: World, error: Exception) -> None:
    world.engine.fails = error
    world.leave(0.5)
    await_true(world.interrupts.is_set, "the script is interrupted")
    assert world.engine.problems == [f"{type(error).__name__}: {error}"]


def test_a_situation_that_is_not_clear_is_looked_at_again(world: World) -> None:
    world.engine.situation = replace(EVALUATING, over=True)
    world.engine.is_unclear = True
    world.leave(600.0)
    await_true(lambda: world.engine.looks > 3, "it is looked at again")
    assert not world.interrupts.is_set() and not world.guard.is_taken_out
    world.engine.is_unclear = False
    await_true(no_thread, "the script leaves by itself")


def test_a_script_that_holds_the_state_is_waited_for_as_long_as_there_is_time(world: World) -> None:
    with world.guard.held():
        world.leave(0.5)
        await_true(world.interrupts.is_set, "the script is interrupted")
    assert not world.engine.written and world.engine.problems == ["the script's thread is changing the state"]


def test_a_script_that_comes_to_the_runtime_meanwhile_needs_no_signal(world: World) -> None:
    saving, ended = threading.Event(), threading.Event()
    write = world.engine.begin_last_write

    def slowly(form: Form, leave_by_s: float) -> None:
        write(form, leave_by_s)
        saving.set()

    def end(leave_by_s: float, problem: str) -> membership_pb2.LastCheckpoint:
        assert ended.wait(5.0)
        return membership_pb2.LastCheckpoint(part=0, parts=1, written=True)

    world.engine.begin_last_write, world.engine.end_last_write = slowly, end  # type: ignore[method-assign]
    world.leave(5.0)
    assert saving.wait(5.0)
    threading.Timer(0.2, ended.set).start()
    with pytest.raises(LeaveInterrupt):
        world.guard.check()
    assert ended.is_set() and not world.interrupts.is_set()


def test_a_script_that_ignores_the_interrupt_is_ended_when_the_time_is_over(world: World) -> None:
    began_s = time.monotonic()
    world.leave(0.5)
    await_true(lambda: bool(world.ended), "the process is ended")
    assert world.ended == [EXIT_CODE] and time.monotonic() - began_s >= 0.4


def test_the_end_of_the_script_waits_for_the_leave_that_has_begun(world: World) -> None:
    gate, order = threading.Event(), []
    finish: Callable[[float, str], membership_pb2.LastCheckpoint] = world.engine.end_last_write

    def end(leave_by_s: float, problem: str) -> membership_pb2.LastCheckpoint:
        assert gate.wait(5.0)
        order.append("written")
        return finish(leave_by_s, problem)

    world.engine.end_last_write = end  # type: ignore[method-assign]
    world.leave(3.0)
    await_true(lambda: bool(world.engine.written), "the write begins")
    threading.Timer(0.2, gate.set).start()
    world.late.close()
    order.append("closed")
    assert order == ["written", "closed"] and not world.interrupts.is_set() and not world.ended
