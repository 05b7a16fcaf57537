"""Reports this worker's committed steps to its agent.

Owns the pace of progress reports, the account of this worker's time that they carry, and the first commit of a
generation, which is reported exactly once: it makes this worker known as a holder. Knows nothing of breaks and
suspicions, which member.py reports.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

from bagua_contract import session_pb2
from bagua_contract.records import Generation
from bagua_contract.time_use import TimeUse
from bagua_core.elastic.checks.step_timing import Pace
from bagua_core.elastic.checks.stragglers import Findings
from bagua_core.elastic.checks.time_account import TimeAccount, use_of_entry
from bagua_core.elastic.membership.member import Member

PROGRESS_EVERY_S = 0.25


class AgentReports:
    def __init__(self, member: Member) -> None:
        self._member = member
        self._pace = Pace(PROGRESS_EVERY_S)
        self._entered = 0
        self._account = TimeAccount(time.monotonic())
        self._aside: TimeUse | None = TimeUse.START  # why this worker has no generation

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
        self._member.session.progress(
            session_pb2.Progress(
                generation=self._member.number,
                step=step,
                epoch=epoch,
                steps_per_s=self._pace.steps_per_s,
                metrics=dict(metrics),
                spent_s={use.value: seconds for use, seconds in self._account.seconds.items()},
                step_counts=self._account.step_counts,
                step_sum_s=self._account.step_sum_s,
            )
        )

    # -- the account of this worker's time

    def step_committed(self, step_s: float) -> None:
        """step_s: since the boundary before."""
        self._account.step(step_s)
        self._account.lap(TimeUse.STEP, time.monotonic())

    def step_failed(self) -> None:
        """It was rolled back."""
        self._account.lap(TimeUse.FAILED_STEP, time.monotonic())

    def spent(self, use: TimeUse, since_s: float) -> None:
        """The time from since_s, of the monotonic clock, to now was for `use`, whatever the rest is for."""
        self._account.part(use, time.monotonic() - since_s)

    def set_aside(self, *, keeps_state: bool) -> None:
        """This worker has no generation any more. keeps_state: all stepped aside for an empty one."""
        if self._aside is None:  # else it has not trained yet, or still waits
            self._aside = TimeUse.WAITING if keeps_state else TimeUse.STANDBY

    def generation_entered(self, generation: Generation) -> None:
        """This worker takes part in it from now on."""
        self._account.lap(use_of_entry(self._aside, generation), time.monotonic())
        self._aside = None

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
