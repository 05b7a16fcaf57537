"""The end of a step: commits what is final and rolls back what is not.

A commit has a part that needs no other worker (`_commit_here`), which a leave in the script's place runs too. Which
ledger lines are due is commit_history.py's. Everything runs in the script's thread.
"""

from __future__ import annotations

import time

from bagua_contract.environment import WorkerEnvironment
from bagua_core import tracing
from bagua_core.communication.communicator import CollectiveFailed
from bagua_core.communication.shards.shard_tree import leaves_of
from bagua_core.elastic.checkpoint.job_checkpoints import JobCheckpoints
from bagua_core.elastic.checkpoint.writer import NOTHING_SAVED
from bagua_core.elastic.checks.stragglers import shard_share
from bagua_core.elastic.membership.agent_reports import AgentReports
from bagua_core.elastic.replica.own_replica import Outcome
from bagua_core.elastic.state.commit_history import Entry
from bagua_core.elastic.step.current_step import CurrentStep
from bagua_core.elastic.step.replica_checks import ReplicaChecks
from bagua_core.elastic.step.script_inputs import ScriptInputs
from bagua_core.elastic.step.step_states import Event, Phase
from bagua_core.errors import UserError


class UnfinishedBackward(UserError, RuntimeError):
    """The script went on after an exception in backward."""


class StepEnd(CurrentStep):
    """Adds the end of a step to CurrentStep: commit and roll-back."""

    inputs: ScriptInputs
    _checks: ReplicaChecks

    def __init__(self, environment: WorkerEnvironment | None) -> None:
        super().__init__(environment)
        self._workers: tuple[str, ...] = ("",)  # of the generation in force, by global rank
        self._replicas: tuple[str, ...] = ("",)  # see StepPlan.workers
        self._step_from_s = 0.0
        self._job_step = 0  # committed by the job when this worker entered the generation in force
        self._shard_share: float | None = None  # in the newest step that this worker committed
        self._committed_epoch: int | None = None  # of the newest step that this worker committed
        self._stays = False  # with replicas: no shard has anything to follow at this boundary
        self._reports: AgentReports | None = None
        self._checkpoints: JobCheckpoints | None = None

    def _end_step(self) -> None:
        if not self.step_failed:
            for model in self.inputs.models:
                if model.is_unfinished:
                    # Peers may be in the middle of its buckets: no other collective can follow.
                    self.reduction_failed(UnfinishedBackward("a backward pass of this step was not finished"))
                    break
        if self.virtual_shards and not self.step_failed:
            for model in self.inputs.models:
                model.check_shards()
        if self.states.phase is Phase.RUNNING:
            self._close_round()
        if self.states.phase is Phase.RUNNING:
            self._reduce_pair_alone()
        self._agree_on_end()
        step = self.state.name.step
        if self.is_final:
            self.reach("commit.before")
            with tracing.span("commit"):
                self._commit()
            tracing.lap(tracing.STEP, step)
            self.reach("commit.after")
        else:
            with tracing.span("roll back"):
                self._roll_back()
            tracing.lap(tracing.ROLLED_BACK if self.rounds is None else tracing.NOT_AVERAGED, step)

    def _agree_on_end(self) -> None:
        """Has the shards of a replica commit this step together or not at all. Either all of them follow a change of
        membership at this boundary or none does: one that starts the next step waits for the others in it."""
        member = self.member
        if member is None or member.replica is None:
            return
        own = Outcome.FAILED if not self.is_final else Outcome.MOVES if member.is_to_move else Outcome.DONE
        found = member.agree(own)
        if found is Outcome.FAILED and self.is_final:
            self.reduction_failed(CollectiveFailed("another shard of this replica lost the step"))
        self._stays = found is Outcome.DONE

    def _close_round(self) -> None:
        """Exchanges, before the vote, what the members of a round share. See round_end.py."""

    def _round_committed(self) -> None:
        """Marks the samples of a final round as used. See round_end.py."""

    def _roll_back(self) -> None:
        why, self._failure = self._failure, None
        guard = self.state.guard
        with guard.held():
            self.state.resume_point_is_current = guard.stepping = guard.provisional = False
            unknown = self.registry.roll_back()
            for model in self.inputs.models:
                model.step_rolled_back()
            self.registry.roll_back_gradients()
            if self.inputs.source is not None:
                self.inputs.source.seek(self.state.position)
            self.newcomers = frozenset()
            self._drop_copy()
            self.states.take(Event.ROLL_BACK)
        apart = "" if self._reports is None else self._reports.step_failed()
        what = f"step {self.state.name.step} in generation {self.plan.generation} did not happen: {why}"
        self._say(f"{what.removesuffix('.')}; {apart}" if apart else what)
        if parts := self.state.final_parts:
            self._say(
                f"warning: without a copy {parts} of its optimizer steps stay, and the rest is done again"
            )
        if unknown:
            self._say(
                f"warning: the script changed {', '.join(unknown)} in that step, before it failed, by something else "
                "than the optimizer and for the first time: that change stays"
            )

    def _commit(self) -> None:
        position = dict(self.state.position)
        with self.state.guard.held():
            self._commit_here()
        state = self.state
        if self._reports is None or self.member is None:
            return
        source = self.inputs.source
        samples = 0 if source is None else source.sample_count(position)
        self._reports.step_committed(time.monotonic() - self._step_from_s, self.member.waited_s, samples)
        self._reports.entered(state.name.step)
        if self._reports.is_progress_due():
            self._report_progress()
        self._checks.after_commit(self.member, state.name.step)
        if self._checkpoints is not None:
            state.owes_checkpoint |= self._checkpoints.is_due()

    def _commit_here(self) -> None:
        """Does the part of a commit that needs no other worker. Called under the guard."""
        state = self.state
        state.resume_point_is_current = state.guard.stepping = False
        self.most_parts = max(self.most_parts, self.part, state.final_parts)
        if self._micro_batch.weight == 0.0 and any(m.has_local_gradients for m in self.inputs.models):
            # under no_sync(): the next reduction would count what lies in .grad
            self.registry.take_back_fillers()
        self.registry.step_committed()
        if self.member is not None and not self.plan.healing:
            self._shard_share = self._share_of_shards()
            self._checks.step_timed(
                time.monotonic() - self._step_from_s, self.member.waited_s, self._shard_share
            )
        state.history = state.history.committed(
            Entry(
                generation=self.plan.generation,
                step=state.name.step + 1,
                position=tuple(sorted(state.position.items())),
                workers=self._workers,
                healing=self.plan.healing,
                time_s=time.time(),
                job=self._lines.job,
            )
        )
        epoch = self._committed_epoch = state.position["epoch"]
        self._round_committed()
        if self.inputs.source is not None:
            state.position = dict(self.inputs.source.after(state.position))
            self.inputs.source.seek(state.position)
        state.step_committed(self.generation_number)
        if self.member is not None:
            self.member.trail.at(state.name.step)
        state.owes_epoch_end = self.member is not None and state.position["epoch"] != epoch
        for model in self.inputs.models:
            model.step_committed()
        state.guard.provisional = False  # what the models' exchanges changed is final
        self.newcomers = frozenset()
        self.joining = False
        self._drop_copy()
        self.states.take(Event.COMMIT)

    def _share_of_shards(self) -> float | None:
        """Returns the shard share of this worker in the step; None in a job without virtual shards."""
        plan, shards = self.plan, self._micro_batch.shards
        if not shards or plan.active_index is None:
            return None
        own = len(leaves_of(shards, plan.active_count, plan.active_index))
        return shard_share(own, shards, plan.active_count)

    def _report_progress(self) -> None:
        if self._reports is not None:
            saved = NOTHING_SAVED if self._checkpoints is None else self._checkpoints.saved
            self._reports.progress(
                self._job_step if self.joining else self.state.name.step,
                self.state.position["epoch"] if self._committed_epoch is None else self._committed_epoch,
                # what a joiner computed beside the copy, with parameters of its own, says nothing of the job
                {} if self.plan.global_rank in self.plan.healing else self.metrics,
                self.inputs.source,
                self.inputs.models,
                self.inputs.new_order(),
                self.inputs.new_bucket_times(),
                job_loss=self.job_loss,
                checkpoint_step=saved.step,
                checkpoint_trouble=saved.trouble,
                joining=self.joining,
                shard_share=self._shard_share,
            )
