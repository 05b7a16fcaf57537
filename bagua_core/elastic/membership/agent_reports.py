"""Reports this worker's committed steps to its agent.

Owns the pace of progress reports, and the first commit of a generation, which is reported exactly once: it makes this
worker known as a holder. Knows nothing of breaks and suspicions, which member.py reports.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

from bagua_contract import session_pb2
from bagua_core.elastic.checks.step_timing import Pace
from bagua_core.elastic.checks.stragglers import Findings
from bagua_core.elastic.membership.member import Member

PROGRESS_EVERY_S = 0.25


class AgentReports:
    def __init__(self, member: Member) -> None:
        self._member = member
        self._pace = Pace(PROGRESS_EVERY_S)
        self._entered = 0

    def entered(self, step: int) -> None:
        """The first commit in a generation tells the job that this worker holds its state."""
        number = self._member.number
        if self._entered != number:
            self._entered = number
            self._member.first_commit_done()
            self._member.session.entered(number, step)

    def is_progress_due(self) -> bool:
        """A step was done. Whether it is time to say so."""
        due = self._pace.step_done(time.monotonic())
        if due and self._pace.steps_per_s > 0:
            self._member.stalls.usual_step_s = 1.0 / self._pace.steps_per_s
        return due

    def progress(self, step: int, epoch: int, metrics: Mapping[str, float]) -> None:
        self._member.session.progress(self._member.number, step, epoch, self._pace.steps_per_s, metrics)

    def stragglers(self, step: int, found: Findings) -> None:
        """All ranks have found the same; the first alone says so."""
        communicator = self._member.communicator
        if communicator is None or communicator.global_rank != 0:
            return
        number, say = self._member.number, self._member.session.straggler
        for slow in found.named:
            say(
                session_pb2.Straggler(
                    generation=number,
                    step=step,
                    global_rank=slow.global_rank,
                    computing_s=slow.computing_s,
                    others_s=slow.others_s,
                )
            )
        for global_rank in found.recovered:
            say(session_pb2.Straggler(generation=number, step=step, global_rank=global_rank, recovered=True))

    def training_done(self, step: int) -> None:
        self._member.session.training_done(self._member.number, step)
