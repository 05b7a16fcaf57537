"""Leaves the job in the place of a script that has not reached a step boundary in time.

A thread, begun when the agent asks this worker to leave. It asks late_leave_plan.py what to do until that says
something to do: it saves the committed state or nothing, tells the agent, and interrupts the script as Ctrl-C would. A
script that ignores the interrupt is ended when the time is over. Knows no checkpoint files and no step: that is
leaving.py.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext

from bagua_core.communication.devices.device_order import Handover
from bagua_core.elastic.membership.session import AgentMessages, Session
from bagua_core.elastic.state.state_guard import StateBusy, StateGuard
from bagua_core.elastic.step.late_leave_plan import (
    Act,
    Plan,
    decide,
    grace_warning,
    unreadable,
)
from bagua_core.elastic.step.leaving import Leaving

LOOK_EVERY_S = 0.1  # only between the order to leave and the end
SWITCH_INTERVAL_S = 1e-4
"""How long a script that computes in Python keeps the interpreter from this thread and the writer's, which ask for it
after each tensor operation. With the usual 5 ms, the state of a small model takes many seconds to write."""
EXIT_CODE = 128 + signal.SIGTERM  # of a script that ignores the interrupt


def interrupt_script() -> None:
    """Interrupts the script as Ctrl-C does: it sees KeyboardInterrupt. The signal is sent to the main thread, for only
    there it ends a blocking call."""
    main = threading.main_thread().ident
    assert main is not None
    signal.pthread_kill(main, signal.SIGINT)


class LateLeave:
    """Leaves the job in a thread of its own if the script does not reach a boundary in time. interrupt, end: of the
    script and of the process."""

    def __init__(
        self,
        leaving: Leaving,
        guard: StateGuard,
        session: Session,
        interrupt: Callable[[], None] = interrupt_script,
        end: Callable[[int], object] = os._exit,
    ) -> None:
        self._leaving = leaving
        self._guard = guard
        self._session = session
        self._interrupt = interrupt
        self._end = end
        self._leave_by_s = float("inf")
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None
        self._begun = threading.Lock()
        session.on_news(self._on_news)
        self._on_news(session.news)  # it may have been told before the line above

    def _on_news(self, news: AgentMessages) -> None:
        """Begins the thread if the agent asks to leave within a time. Without a limit there is no moment at which a
        boundary would be too late."""
        with self._begun:
            self._begin(news)

    def _begin(self, news: AgentMessages) -> None:
        if news.leave and news.leave_by_s < float("inf") and self._thread is None:
            self._leave_by_s = news.leave_by_s
            thread = threading.Thread(target=self._run, name="bagua-late-leave", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:  # the host allows no thread
                self._say(f"leaves at a step boundary only, since no thread can be started: {error}")
                return
            self._thread = thread

    def close(self) -> None:
        """Ends the thread, since the script has ended. Returns once a leave that this thread has begun is done."""
        self._closed.set()
        self._guard.wait_out()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(2 * LOOK_EVERY_S)

    # -- the thread

    def _run(self) -> None:
        self._warn()
        usual_s = sys.getswitchinterval()
        try:
            self._look_and_leave()
        finally:
            sys.setswitchinterval(usual_s)

    def _look_and_leave(self) -> None:
        while not self._closed.is_set():
            plan, problem = self._look()
            if plan.act is Act.STAND_BACK:
                return
            if plan.act is not Act.WAIT:
                self._leave(plan, problem)
                return
            self._closed.wait(LOOK_EVERY_S)

    def _left_s(self) -> float:
        return self._leave_by_s - time.monotonic()

    def _warn(self) -> None:
        try:
            with self._guard.reading(LOOK_EVERY_S):
                situation, measured = self._leaving.late_situation(self._left_s())
        except Exception:  # noqa: BLE001 (what it is shows when there is something to do)
            return
        if warning := grace_warning(situation, measured=measured):
            self._say(warning)

    def _look(self) -> tuple[Plan, str]:
        """Returns what to do, and why the state is not being saved, if it should be. If the plan calls for a leave, the
        leave has begun."""
        try:
            with self._guard.reading(LOOK_EVERY_S) as work:
                situation, _ = self._leaving.late_situation(self._left_s())
                plan = decide(situation)
                if self._closed.is_set():
                    return Plan(Act.STAND_BACK, "the script has ended"), ""
                if plan.act in (Act.WAIT, Act.STAND_BACK):
                    return plan, ""
                self._guard.take_out(self._leave_by_s)
                sys.setswitchinterval(SWITCH_INTERVAL_S)
                if plan.act is not Act.SAVE:
                    return plan, plan.reason if plan.act is Act.GIVE_UP else ""
                return plan, self._save(plan, work)
        except StateBusy:
            plan = unreadable(self._left_s(), "the script's thread is changing the state")
        except Exception as error:  # noqa: BLE001 (told to the agent; until then a boundary may come)
            plan = unreadable(self._left_s(), f"{type(error).__name__}: {error}")
        if plan.act is Act.GIVE_UP:
            self._guard.take_out(self._leave_by_s)
        return plan, plan.reason

    def _save(self, plan: Plan, work: Handover | None) -> str:
        """Begins the last write. Returns why it could not be begun; empty if it was."""
        self._say(f"{plan.reason}: saves the committed state from outside the loop")
        try:
            with nullcontext() if work is None else work.taken_over(self._check_time):
                self._leaving.begin_last_write(plan.form, self._leave_by_s)
        except Exception as error:  # noqa: BLE001 (told to the agent; the leave goes on)
            return f"{type(error).__name__}: {error}"
        return ""

    def _check_time(self) -> None:
        """Raises TimeoutError when the time to leave is over, while the device works off what the state depends on."""
        if self._left_s() <= 0:
            raise TimeoutError("the device did not finish the work that the state depends on")

    def _leave(self, plan: Plan, problem: str) -> None:
        try:
            if plan.act is Act.LEAVE:
                last = self._leaving.without_write()
            else:
                last = self._leaving.end_last_write(self._leave_by_s, problem)
            self._session.left(self._leaving.generation_number, last)
            self._say(f"worker ends: {plan.reason}")
        finally:
            script_knows = self._guard.taken_out()
        if not script_knows:
            self._interrupt()
        if not self._closed.wait(max(0.0, self._left_s())):
            self._say("the script did not end when it was interrupted: its process ends now")
            self._end(EXIT_CODE)

    def _say(self, text: str) -> None:
        print(f"bagua: {text}", file=sys.stderr, flush=True)
