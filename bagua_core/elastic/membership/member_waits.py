"""The waits of a worker that is a member of a generation: in collectives, for a transfer, and for news of the agent.

Every wait ends when what it waits for is done, or when its generation is given up; one that lasts is reported to the
agent (stall_reports.py). The base of Member, which sets `generation` and `communicator`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from bagua_contract.records import Generation
from bagua_core import tracing
from bagua_core.communication.communicator import CollectiveAborted, CollectiveFailed, Communicator, Pending
from bagua_core.elastic.checks.step_timing import LEAST_STALL_S, WaitMonitor
from bagua_core.elastic.checks.time_account import FailedWait
from bagua_core.elastic.membership.session import AgentMessages, Session
from bagua_core.elastic.membership.stall_reports import StallReports
from bagua_core.elastic.waiting.operation_trail import BOUNDARY, FORWARD, STEP, OperationTrail
from bagua_core.elastic.waiting.operations import MismatchedCollective

_SPANS = {FORWARD: "bucket wait", STEP: "bucket wait", BOUNDARY: "vote"}  # in a trace
_NONE_FAILED = FailedWait()


class MemberWaits:
    session: Session
    stalls: StallReports

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.generation: Generation | None = None
        self.communicator: Communicator | None = None
        self.trail = OperationTrail()
        self.waited_s = 0.0  # in collectives, since begin_step
        self.failed_wait = _NONE_FAILED  # the newest since then
        self._waits = WaitMonitor()

    def begin_step(self) -> None:
        """Begins to measure the waits of a new step."""
        self.waited_s, self.failed_wait = 0.0, _NONE_FAILED

    def wait(self, pending: Pending, what: str = STEP) -> None:
        """Waits for `pending`, and measures the wait. what: the name of the runtime's operation, for
        operation_trail.py."""
        began_s, threshold_s = time.monotonic(), self._waits.threshold_s
        try:
            self.wait_unlearned(pending, what)
        except CollectiveFailed:
            self.failed_wait = FailedWait(time.monotonic() - began_s, threshold_s)
            raise
        waited_s = time.monotonic() - began_s
        self.waited_s += waited_s
        self._waits.ended(waited_s)

    def wait_unlearned(self, pending: Pending, what: str = STEP) -> None:
        self._check_agreed()
        self.stalls.wait_begins(self._waits)
        self.trail.wait_begins(what)
        try:
            with tracing.span(_SPANS.get(what, what), track=tracing.SCRIPT):
                pending.wait(self.stalled, self._waits.threshold_s)
        except CollectiveFailed:
            self._check_agreed()
            raise
        self.stalls.went_on()

    def _check_agreed(self) -> None:
        """Raises MismatchedCollective once the agent has reported that ranks wait in different operations."""
        if self.session.news.disagreement:
            raise MismatchedCollective(
                f"{self.session.news.disagreement}. Every worker must call the same collectives in the same order"
            )

    def stalled(self, waited_s: float) -> None:
        """Tells the agent of a wait of this generation that is longer than usual."""
        if self.generation is not None:
            self.stalls.lasts(self.generation.number, waited_s, self._waits, self.trail.waits_in)

    def wait_for_transfer(self, done: Callable[[], bool]) -> None:
        """Waits until `done`. Raises CollectiveAborted when the generation ends first.

        As long as bytes of the state arrive here, the wait is no hang however long it lasts (stall_reports.py).
        """
        communicator, generation = self.communicator, self.generation
        assert communicator is not None and generation is not None
        flag = communicator.abort_flag
        with tracing.span("wait for a copy", track=tracing.SCRIPT):
            is_done = self._wait_until(done, flag.is_set, generation, report=True)
        if not is_done:
            raise CollectiveAborted(flag.reason or "aborted")

    def _wait_until(
        self, done: Callable[[], bool], given_up: Callable[[], bool], generation: Generation, *, report: bool
    ) -> bool:
        began_s = time.monotonic()
        waits = self.stalls.wait_begins(WaitMonitor())
        look_s = waits.threshold_s
        while True:
            with self.changed:
                self.changed.wait_for(lambda: done() or given_up(), timeout=0.05)
            if done():
                self.stalls.went_on()
                return True
            self._check_agreed()
            if given_up():
                return False
            waited_s = time.monotonic() - began_s
            if report and waited_s >= look_s:
                look_s = waited_s + LEAST_STALL_S
                self.stalls.lasts(generation.number, waited_s, waits)

    def _wait_for_news(
        self, seen: AgentMessages, given_up: Callable[[], bool], most_s: float = float("inf")
    ) -> None:
        """Waits until the agent says anything new, at most most_s. There is no limit by default: holding the state is
        what this worker is for."""
        until_s = time.monotonic() + most_s
        with tracing.span("wait for news"), self.changed:
            while self.session.news is seen and not given_up() and (left_s := until_s - time.monotonic()) > 0:
                self.changed.wait(timeout=min(1.0, left_s))
