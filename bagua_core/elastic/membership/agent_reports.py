"""Reports this worker's committed steps to its agent.

Owns the pace of progress reports, the account of this worker's time that they carry, and the first commit of a
generation, which is reported exactly once: it makes this worker known as a holder. Knows nothing of breaks and
suspicions, which member.py reports.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from bagua_contract import session_pb2
from bagua_contract.addresses import parted
from bagua_contract.records import Generation
from bagua_contract.time_use import TimeUse
from bagua_core import tracing
from bagua_core.communication import traffic
from bagua_core.communication.local_interface import interface_of
from bagua_core.communication.reduction.reported_loss import JobLoss
from bagua_core.communication.step_interface import DataSource, Model
from bagua_core.elastic.checks.step_timing import Pace, UsualStep
from bagua_core.elastic.checks.stragglers import Findings
from bagua_core.elastic.checks.time_account import TimeAccount, use_of_entry, use_of_failed_wait
from bagua_core.elastic.membership.member import Member

PROGRESS_EVERY_S = 0.5  # the page looks once a second, the tuner as often as reports come
LONGEST_TROUBLE = 500


class AgentReports:
    def __init__(self, member: Member) -> None:
        self._member = member
        self._pace = Pace(PROGRESS_EVERY_S)
        self._usual_step = UsualStep()
        self._entered = 0
        self._measured: list[tuple[int, str]] = []  # models, with their algorithms
        self._gradient_bytes = 0  # of these models
        # Gloo listens and connects at this address
        self._interface = interface_of(parted(member.rendezvous.address)[0]) or ""
        self._samples = 0
        self._account = TimeAccount(time.monotonic())
        self._aside: TimeUse | None = TimeUse.START  # why this worker has no generation

    def entered(self, step: int) -> None:
        """Reports the first commit in a generation, which tells the job that this worker holds its state."""
        number = self._member.number
        if self._entered != number:
            self._entered = number
            self._member.first_commit_done()
            self._member.session.entered(number, step, self._account.take_lost())

    def is_progress_due(self) -> bool:
        """Notes that a step was done, and tells whether it is time to report it."""
        return self._pace.step_done(time.monotonic())

    def progress(
        self,
        step: int,
        epoch: int,
        metrics: Mapping[str, float],
        source: DataSource | None = None,
        models: Sequence[Model] = (),
        order: Sequence[int] = (),
        bucket_times: Sequence[tuple[int, float]] = (),
        job_loss: JobLoss | None = None,
        checkpoint_step: int = 0,
        checkpoint_trouble: str = "",
        joining: bool = False,
        shard_share: float | None = None,
    ) -> None:
        """Reports the progress of this worker. order, bucket_times: see script_inputs.new_order, new_bucket_times.
        checkpoint_step, checkpoint_trouble: see writer.Saved. joining: it has committed no step since it joined; step
        is then the job's. shard_share: see stragglers.shard_share()."""
        if self._measured != (named := [(id(m), m.algorithm_name) for m in models]):
            self._measured = named
            self._gradient_bytes = sum(
                p.nbytes for m in models for p in m.module.parameters() if p.requires_grad
            )
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
                computing_s=self._account.computing_s,
                total_steps=0 if source is None else source.job_steps,
                step_samples=0 if source is None else source.global_batch_size,
                samples=self._samples,
                sent_bytes=traffic.to_collectives.total_bytes,
                copied_bytes=traffic.copied.total_bytes,
                copied_s=traffic.copied.total_s,
                interface=self._interface,
                gradient_bytes=self._gradient_bytes,
                algorithm=named[0][1] if named else "",
                warms_up=any(m.warms_up for m in models),
                order=order,
                bucket_times=[
                    session_pb2.BucketTime(bytes=size, seconds=took) for size, took in bucket_times
                ],
                checkpoint_trouble=checkpoint_trouble[:LONGEST_TROUBLE],
                checkpoint_step=checkpoint_step,
                job_loss=0.0 if job_loss is None else job_loss.mean,
                job_losses=0 if job_loss is None else job_loss.reporting,
                joining=joining,
                shard_share=shard_share,
            )
        )

    # -- the account of this worker's time

    def step_committed(self, step_s: float, waited_s: float, samples: int) -> None:
        """Accounts for a committed step. step_s: since the boundary before. waited_s: of it, in collectives. samples:
        of all workers; 0: unknown."""
        self._samples += samples
        self._account.step(step_s, waited_s)
        self._usual_step.step_done(step_s)
        self._member.stalls.usual_step_s = self._usual_step.seconds
        self._account.lap(TimeUse.STEP, time.monotonic())

    def step_failed(self, *, steps_until_s: float | None = None) -> str:
        """Accounts for a step that was rolled back. steps_until_s: of the monotonic clock; what was trained until then
        is kept, and counts as steps. Returns why its last wait counts apart; empty if it does not."""
        if steps_until_s is not None:
            self._account.lap(TimeUse.STEP, steps_until_s)
        wait = self._member.failed_wait
        use, reason = use_of_failed_wait(wait)
        if use is not TimeUse.FAILED_STEP:
            self._account.part(use, wait.waited_s)
        self._account.lap(TimeUse.FAILED_STEP, time.monotonic())
        return "" if use is TimeUse.FAILED_STEP else reason

    def spent(self, use: TimeUse, since_s: float) -> None:
        """Counts the time from since_s, of the monotonic clock, to now for `use`, whatever the rest is for."""
        self._account.part(use, time.monotonic() - since_s)
        if (recorder := tracing.active) is not None:
            recorder.span(use.value, int(since_s * 1e9), track=tracing.SCRIPT)

    def set_aside(self, *, keeps_state: bool) -> None:
        """Notes that this worker has no generation any more. keeps_state: all stepped aside for an empty one."""
        if self._aside is None:  # else it has not trained yet, or still waits
            self._aside = TimeUse.WAITING if keeps_state else TimeUse.STANDBY

    def generation_entered(self, generation: Generation, step: int) -> None:
        """Notes that this worker takes part in `generation` from now on. step: committed ones."""
        use = use_of_entry(self._aside, generation)
        self._account.lap(use, time.monotonic())
        self._aside = None
        communicator = self._member.communicator
        assert communicator is not None
        place = communicator.global_rank, communicator.world_size
        tracing.moved(generation.number, *place, generation.kind.name.lower(), generation.reason, step)
        tracing.lap(use.value, generation.number)

    def stragglers(self, step: int, found: Findings) -> None:
        """Reports the ranks that are slow or have recovered. All ranks of the lane have found the same; the first alone
        reports it."""
        lane = self._member.lane
        if lane is None or lane.global_rank != 0:
            return
        number, say = self._member.number, self._member.session.straggler
        for slow in found.named:
            say(
                session_pb2.Straggler(
                    generation=number,
                    step=step,
                    global_rank=self._member.of_this_shard(slow.global_rank),
                    computing_s=slow.computing_s,
                    others_s=slow.others_s,
                )
            )
        for replica_rank in found.recovered:
            global_rank = self._member.of_this_shard(replica_rank)
            say(session_pb2.Straggler(generation=number, step=step, global_rank=global_rank, recovered=True))

    def training_done(self, step: int) -> None:
        self._member.session.training_done(self._member.number, step)
