"""Tells the agent of waits that last longer than usual, with the hosts that do not answer.

A wait is no hang as long as bytes of the job's state arrive here, whatever the worker waits in: each report of them
begins a new wait. The other members' reports grow old meanwhile; one that does not is enough (bagua_agent, hang.py).
"""

from __future__ import annotations

from collections.abc import Callable

from bagua_contract.addresses import parted
from bagua_contract.collective_wait import CollectiveWait
from bagua_contract.records import Generation, SuspicionKind
from bagua_core.communication import traffic
from bagua_core.elastic.checks.step_timing import WaitMonitor, moving_report_s
from bagua_core.elastic.membership.session import Session
from bagua_core.elastic.waiting import unanswered


class StallReports:
    """Reports this worker's long waits to its agent. record_of(number): the generation, if it is one of the last
    kept_records."""

    def __init__(
        self, session: Session, record_of: Callable[[int], Generation | None], kept_records: int
    ) -> None:
        self._session = session
        self._record_of = record_of
        self._kept_records = kept_records
        self.usual_step_s = 0.0
        self._stall_said: int | None = None  # generation of the stall that the agent knows of
        self._silent_said: frozenset[str] = frozenset()
        self._arrived_bytes = 0  # of the state, when the wait began or was last seen to move
        self._began_s = 0.0  # what counts of the wait, since it began
        self._moving_s = 0.0  # the next report that it moves
        self._sockets_before: dict[int, frozenset[int]] = {}  # by generation: those that are none of its

    def begins_to_build(self, number: int) -> None:
        """Notes the sockets that are open before the first connection of generation `number`."""
        self._sockets_before[number] = unanswered.own_sockets()
        if len(self._sockets_before) > self._kept_records:
            del self._sockets_before[min(self._sockets_before)]

    def wait_begins(self, waits: WaitMonitor) -> WaitMonitor:
        waits.begin()
        self._silent_said = frozenset()
        self._arrived_bytes = traffic.state_arrived.total_bytes
        self._began_s = self._moving_s = 0.0
        return waits

    def lasts(
        self,
        number: int,
        waited_s: float,
        waits: WaitMonitor,
        waits_in: Callable[[], CollectiveWait | None] = lambda: None,
    ) -> None:
        """Reports a wait if it is longer than usual. waited_s: since wait_begins. waits_in: what it is in, called only
        when it is reported."""
        if (arrived_bytes := traffic.state_arrived.total_bytes) != self._arrived_bytes:
            if waited_s >= self._moving_s:
                self._moves(number, waited_s, waits)
                self._arrived_bytes = arrived_bytes
            return
        waited_s -= self._began_s
        due = waits.is_stalled(waited_s)
        if not due and self._stall_said is None:
            return
        silent = self._silent_hosts(number)
        if not due and self._silent_said.issuperset(silent):
            return
        self._stall_said, self._silent_said = number, frozenset(silent)
        no_answer = f"; no answer from {', '.join(silent)}" if silent else ""
        self._session.suspect(
            number,
            SuspicionKind.STALLED,
            hosts=silent,
            detail=f"a collective has taken {waited_s:.2f} s so far{no_answer}",
            waited_s=waited_s,
            usual_step_s=self.usual_step_s,
            waits_in=waits_in(),
        )

    def _moves(self, number: int, waited_s: float, waits: WaitMonitor) -> None:
        """Reports a wait during which the state arrives. This is not went_on: a worker that reports no wait is outside
        the step's collectives, and the others would seem to wait for it."""
        record = self._record_of(number)
        waits.begin()
        self._began_s = waited_s
        self._moving_s = waited_s + moving_report_s(len(record.members) if record is not None else 1)
        self._stall_said, self._silent_said = number, frozenset()
        self._session.suspect(
            number,
            SuspicionKind.STALLED,
            hosts=(),
            detail="it waits for the job's state, which is arriving",
            usual_step_s=self.usual_step_s,
        )

    def _silent_hosts(self, number: int) -> tuple[str, ...]:
        """Returns the hosts of that generation's members from which the transport hears nothing."""
        record, before = self._record_of(number), self._sockets_before.get(number)
        if record is None or before is None:
            return ()
        hosts = {parted(m.store_address)[0] for m in record.members}
        return unanswered.silent_hosts(hosts, before)

    def went_on(self) -> None:
        """Reports that a wait ended well. One that failed is followed by a break or a generation, which end the
        suspicion."""
        if self._stall_said is not None:
            self._session.went_on(self._stall_said)
            self._stall_said = None
