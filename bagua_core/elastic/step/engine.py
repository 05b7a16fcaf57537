"""The boundary of a step: begins the next step, and follows changes of membership.

The step under way and its reductions are current_step.py's, its commit and roll-back step_end.py's. What is committed
is committed_state.py's; copies are copying.py's, the script's own collectives outside_collectives.py's; where the job
goes is member.py. Everything runs in the script's thread.

The *resume point* of a step is where the script goes on when the step is done again: the loader's yield, or the return
of next_step(). What a failed step changed goes back to its values there.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch

from bagua_contract import membership_pb2
from bagua_contract.environment import WorkerEnvironment
from bagua_contract.records import Generation, StateName
from bagua_contract.time_use import TimeUse
from bagua_core import tracing
from bagua_core.communication.communicator import CollectiveAborted, CollectiveFailed, ReduceOp
from bagua_core.communication.reducible import check_reducible
from bagua_core.communication.step_interface import DataSource, MicroBatch, Model, Stateful, StepPlan
from bagua_core.elastic.checkpoint.job_checkpoints import JobCheckpoints, settings_of
from bagua_core.elastic.heal.heal_plan import HealPlan
from bagua_core.elastic.membership import entry
from bagua_core.elastic.membership.agent_reports import AgentReports
from bagua_core.elastic.membership.member import Member
from bagua_core.elastic.replica import refusals, torch_group
from bagua_core.elastic.script_collectives.before_loop import BeforeLoop
from bagua_core.elastic.script_collectives.default_group import forbid_default_group
from bagua_core.elastic.script_collectives.outside_collectives import OutsideCollectives
from bagua_core.elastic.step.copying import Copying
from bagua_core.elastic.step.deterministic_worker import refuse_without_loader
from bagua_core.elastic.step.late_leave import LateLeave
from bagua_core.elastic.step.leaving import Leaving
from bagua_core.elastic.step.replica_checks import ReplicaChecks
from bagua_core.elastic.step.round_end import RoundsNeedLoader
from bagua_core.elastic.step.script_inputs import ScriptInputs
from bagua_core.elastic.step.script_ranks import ScriptRanks
from bagua_core.elastic.step.step_seed import announced_seed, seed_micro_batch
from bagua_core.elastic.step.step_states import Event, Phase
from bagua_core.elastic.waiting.operation_trail import COMPARISON
from bagua_core.optimizers.optimizer_gate import gate_registered


class Engine(ScriptRanks):
    """The engine of this process: begins steps and follows the job's generations. environment None: a world of one, not
    launched."""

    def __init__(self, environment: WorkerEnvironment | None) -> None:
        super().__init__(environment)
        self.local_rank = environment.local_rank if environment else 0
        self._ended = False  # the process leaves the job

        self._announced = MicroBatch(1.0, True)  # what a step that next_step() announced begins with

        self._outside: OutsideCollectives | None = None
        self._late_leave: LateLeave | None = None
        self._leaving: Leaving | None = None
        member = self.member = None if environment is None else Member(environment, self)
        self.inputs = ScriptInputs(self.state, member, self.virtual_shards)
        if environment is not None and member is not None:
            self.copying = Copying(self.state, member, self._swap_in, self.reach, self._say)
            self._before_loop = BeforeLoop(member)
            self._outside = OutsideCollectives(self, self.state, member, self._before_loop)
            self._reports = AgentReports(member)
            self.registry.watches = True
            self._checkpoints = JobCheckpoints(
                settings_of(environment),
                self.state,
                member,
                self._swap_in,
                self.info,
                self._lines.resumed,
                self.fingerprint,
                self._say,
            )
        self._checks = ReplicaChecks(
            environment.digest_every_steps if environment else 0,
            self.inputs.parameters,
            lambda pending: self._wait_in(pending, COMPARISON),
            self._reports,
        )
        if self.member is not None:  # last: its thread may begin at once
            assert self._checkpoints is not None
            self._leaving = Leaving(
                self, self.member, self._checkpoints, self.inputs.models, self._commit_here
            )
            if self.replica_size_asked == 1:  # a shard leaves with its replica, at a boundary
                self._late_leave = LateLeave(self._leaving, self.state.guard, self.member.session)

    @property
    def collectives(self) -> OutsideCollectives | None:
        """The script's own collectives; None under plain `python`."""
        return self._outside

    @property
    def answered_collectives(self) -> int:
        """The number of the script's own collectives within steps that other workers have answered. See StepEngine."""
        return 0 if self._outside is None else self._outside.answered_in_step

    # -- what the script and the loader bring

    def attach_source(self, source: DataSource) -> None:
        """Makes `source` the loader that defines the job's steps. Raises SecondLoaderError, NotForReplicas."""
        if (places := source.place_in_replica[1]) > 1:
            refusals.check_divided((m.module for m in self.inputs.models), places)
        self.inputs.attach_source(source, has_begun=self.in_step or self.state.name.step > 0)
        self.rounds = source.rounds
        self._lines.source = source

    def attach_model(self, model: Model) -> None:
        """Adds `model` to those that the job trains. Raises NotForReplicas, NoReplicaYet."""
        refusals.check_assembled(self.replica_size_asked, self.replica_size > 1)
        if self.replica_size > 1:
            refusals.check_model(model.algorithm_name, model.module.parameters(), self.replica_size)
            if (places := self.inputs.place_in_replica[1]) > 1:
                refusals.check_divided([model.module], places)
        self.inputs.attach_model(model)

    def share_in_replica(self, tensors: Sequence[torch.Tensor]) -> None:
        """Gives all workers of this worker's replica shard 0's values of `tensors`. See StepEngine."""
        refusals.check_assembled(self.replica_size_asked, self.replica_size > 1)
        if self.replica_size > 1:
            torch_group.share(tensors)

    def detach_model(self, model: Model) -> None:
        """Removes `model`, which takes part in no step from now on. See StepEngine."""
        self.inputs.detach_model(model)

    def seed(self, seed: int) -> None:
        """Sets what a step's random numbers follow from, unless a loader brings a seed of its own."""
        if self.inputs.source is None:
            self.inputs.seed = seed

    def fingerprint(self) -> dict[str, str]:
        """Returns the fingerprint of this worker's model and script."""
        return self.inputs.fingerprint()

    def register_state(self, name: str, stateful: Stateful) -> None:
        self.registry.register(name, stateful)
        gate_registered(stateful, self)

    def epoch_begins(self, epoch: int) -> None:
        """Notes that the loader yields `epoch` to the script. See StepEngine."""
        if self._outside is not None:
            self._outside.epoch_begins(epoch)

    def epoch_ends(self) -> None:
        if self._outside is not None:
            self._outside.epoch_ends()

    # -- the boundary

    def boundary(self, goes_on: bool = False, confirmed: bool = False) -> StepPlan:
        """Ends the step before, follows a newer generation and returns the plan of the next step. Another call before
        that step has begun returns the plan in force by then. See StepEngine."""
        self.state.guard.check()
        if self._outside is not None:
            self._outside.boundary()
        if self.in_step:
            self._end_step_for(goes_on, confirmed)
        if self.inputs.seed is None:
            self.inputs.seed = torch.initial_seed()
        if self.member is not None:
            forbid_default_group()
            if not self.member.rendezvous.gpus or self.member.generation is None or self._is_gathered:
                self.inputs.prepare_entry(self.member)
            self._follow_or_end(self.member)
        self._plan_step()
        while self.is_round_open and self.member is not None:
            # Members hold local steps that no average contains: it comes before any new lease.
            self.begin_micro_batch(MicroBatch(0.0, True))
            self._end_step_for(goes_on, confirmed)
            self._follow_or_end(self.member)
            self._plan_step()
        return self.plan

    def _end_step_for(self, goes_on: bool, confirmed: bool) -> None:
        """Ends the step for a boundary. Once it is committed, this worker may owe the collective that confirms it. A
        round is confirmed if any member asks for it: one may have no batch in it, and so no place to ask."""
        step, self._confirms = self.state.name.step, confirmed
        self._end_step()
        confirmed, self._confirms = self._confirms, False
        if self.state.name.step > step and (confirmed or (goes_on and self._is_to_save_and_step_aside())):
            self.state.owes_epoch_end = self.member is not None

    def _follow_or_end(self, member: Member) -> None:
        """Follows the job. Ends this worker's part in it too if the script is ended meanwhile."""
        try:
            self._follow(member)
        except (SystemExit, KeyboardInterrupt):
            self._ended = True
            raise

    def _plan_step(self) -> None:
        # One that copies the state beside the step does not have it yet, but takes part in this very step.
        step = self._job_step if self._is_newcomer else self.state.name.step
        lane = self.communicator()
        place = (0, 1) if lane is None else (lane.global_rank, lane.world_size)
        self.plan = StepPlan(self.generation_number, step, *place, self.newcomers, self._replicas)
        self._step_from_s = self._step_begins_s(time.monotonic())
        if self.member is not None:
            self.member.begin_step()
        if (recorder := tracing.active) is not None:
            recorder.boundary_ends()

    def _follow(self, member: Member) -> None:
        """Enters the generation in force. At an epoch's end this waits until all workers have its last step: what the
        script does between two epochs is done once by each of them, so no worker may copy it from another."""
        assert self._outside is not None
        stays, self._stays = self._stays, False
        if stays and member.generation is not None and not self._owes_epoch_end():
            return
        if self._owes_epoch_end() and self._is_to_save_and_step_aside():
            # What the script does between two epochs belongs to the last checkpoint: step aside at the next boundary.
            self._outside.confirm(self._owes_epoch_end)
            if not self._is_newcomer:
                self.state.owes_epoch_end = False
                if member.generation is not None and not member.broken:
                    return
        while True:
            if self._owes_epoch_end() and member.generation is not None:
                self._outside.confirm(self._owes_epoch_end)
                if not self._is_newcomer:
                    self.state.owes_epoch_end = False
            member.follow()
            if not self._owes_epoch_end():
                return

    def _is_to_save_and_step_aside(self) -> bool:
        """Tells whether a last checkpoint is written at a boundary from here on, as all members have agreed."""
        saves = self._checkpoints is not None and self._checkpoints.is_on
        return saves and self.member is not None and self.member.is_to_step_aside

    def _owes_epoch_end(self) -> bool:
        """Tells whether this worker owes the collective of an epoch's end. A joiner takes part in nothing before its
        first step, even if the state that it copied at once owes it."""
        return self.state.owes_epoch_end and not self._is_newcomer

    def begin_micro_batch(self, micro_batch: MicroBatch) -> None:
        if micro_batch.part != 1.0:
            refusals.check_scaled(len(self.inputs.models))
        self._micro_batch, self.in_forward = micro_batch, False
        if self.in_step:
            if micro_batch.shards:
                self._seed_generators()
            return
        if not self.state.resume_point_is_current:
            self._resume_point()
        self._seed_generators()
        self.states.take(Event.BEGIN, f"step {self.plan.step} of generation {self.plan.generation}")
        self.part, self._lets_change = 0, False
        self._failure = None
        member = self.member
        if member is not None:
            member.agreed = None
            if self.rounds is None and (member.broken or member.number != self.plan.generation):
                self._fail(CollectiveAborted("the generation changed before the step began"))
            elif self.copying is not None:
                if self.newcomers and not self._is_newcomer:
                    for model in self.inputs.models:
                        model.copy_begins()
                self.copying.step_begins()
        self.reach("step.begin")

    def _resume_point(self) -> None:
        """Makes what the script did since the last commit part of the state, and of the checkpoint that is due."""
        with self.state.guard.held(), tracing.span("resume point"):
            if self.state.owes_checkpoint and self._checkpoints is not None:
                self.state.owes_checkpoint = False
                if self.plan.active_index is not None:
                    begin_s = time.monotonic()
                    self._checkpoints.write(self.plan.active_index, self.plan.active_count)
                    if self._reports is not None:
                        self._reports.spent(TimeUse.CHECKPOINT, begin_s)
            self.registry.snapshot(with_gradients=self.registry.watches and self.rounds is None)
            self.state.resume_point_is_current = True

    def _seed_generators(self) -> None:
        seed_micro_batch(self.inputs.seed or 0, self.plan, self._micro_batch, self.inputs.place_in_replica)

    def next_step(self, resumes_here: bool = True) -> int:
        """Makes the boundary of loops without the loader, and returns the number of steps committed so far.

        resumes_here: when the step is done again, so is what the script does from here to the first forward.
        """
        if self.round_steps is not None:
            raise RoundsNeedLoader(
                "an algorithm whose unit of commit is the round leases samples; draw batches from "
                'bagua.ElasticDataLoader, or use the algorithm with unit="step"'
            )
        refuse_without_loader(self.virtual_shards)
        if self.states.phase is Phase.ANNOUNCED:
            self.begin_micro_batch(self._announced)  # its body trained nothing, and counts all the same
        plan = self.boundary()
        self._places_asked = set()
        weight = 0.0 if plan.active_index is None else 1.0 / plan.active_count
        self._announced = MicroBatch(weight, True)
        if resumes_here:
            self._resume_point()
        if self.inputs.models:
            seed = announced_seed(self.inputs.seed or 0)
            seed_micro_batch(seed, self.plan, self._announced, self.inputs.place_in_replica)
            self.states.take(Event.ANNOUNCE)
        else:
            self.begin_micro_batch(self._announced)
        return plan.step

    def forward_begins(self) -> None:
        """Begins the step that next_step() announced, since a model is about to compute gradients. After the last one
        the loop ends instead, and what follows is outside steps."""
        self.in_forward = True
        if self.states.phase is Phase.ANNOUNCED:
            self.begin_micro_batch(self._announced)
        else:
            self._forward_in_step()

    # -- entering a generation (called by the member)

    def stepped_out(self, left: Generation, *, keeps_state: bool, together: bool) -> None:
        """Sets this worker aside: no generation in force lists it any more. See host.Host."""
        assert self._leaving is not None
        with self.state.guard.held():
            self._drop_copy()
            if self._reports is not None:
                self._reports.set_aside(keeps_state=keeps_state)
            self._leaving.stepped_out(left, keeps_state=keeps_state, together=together)
            self.newcomers = frozenset()
        for model in self.inputs.models:
            model.communicator_changed()

    def before_leaving(self) -> membership_pb2.LastCheckpoint | None:
        """Finishes what is to be saved before this worker leaves. See host.Host."""
        return None if self._leaving is None else self._leaving.before_leaving()

    def take_part(self, generation: Generation, plan: HealPlan, infos: list[entry.Info]) -> None:
        communicator = self.communicator()
        assert communicator is not None and self.copying is not None and self._checkpoints is not None
        assert self.member is not None
        self.newcomers, self.joining = frozenset(), False
        if generation.is_gathering:
            self.member.trail.at(0)
            return
        self._lines.job = generation.nonce
        plan, infos = self._checkpoints.resume(generation, plan, infos)
        self.newcomers = plan.newcomers
        self.is_round_open = any(infos[rank].kept for rank in plan.holders)
        self.joining = communicator.global_rank in plan.newcomers
        if self.joining:
            # It may have trained before it was left out, in a round whose samples others have used since
            if self.rounds is not None:
                self.rounds.drop()
            for model in self.inputs.models:
                model.state_replaced()
        self._checks.generation_entered()
        # those with this shard, by replica rank
        own = self.member.replica
        placed = [m for m in generation.members if own is None or m.shard_rank == own.shard_rank]
        self._workers = tuple(m.worker_id for m in placed)
        self._replicas = tuple(m.worker_id for m in generation.members if own is None or m.shard_rank == 0)
        self._roster = {m.worker_id: m.since_generation for m in placed}
        if own is not None and own.shard_rank > 0:
            self._lines.end()  # one line a replica
        self._drop_copy()
        self._lines.write(self.state.history.entered(self.worker_id, self._roster))
        position = dict(infos[plan.holders[0]].position)
        self._job_step = plan.furthest.step
        begin_s = time.monotonic()
        is_read = communicator.global_rank in plan.sources and bool(plan.rounds)
        with self.at_round_begin() if is_read else nullcontext():
            self.copying.enter(communicator, plan)
        if plan.initial and self.rounds is not None:
            # All members have one state now. A name keeps a loss in the first round from undoing local steps.
            self.state.name = StateName(generation.number, 0, 0)
        if self._reports is not None and plan.rounds:
            self._reports.spent(TimeUse.HEAL, begin_s)
        self.state.position = position
        if self.inputs.source is not None:
            self.inputs.source.seek(position)
        self.inputs.generation_entered(generation.settings)
        if not self.joining:
            self.member.trail.at(self.state.name.step)
        if self._reports is not None:
            self._reports.generation_entered(generation, self.state.name.step)

    def _swap_in(self, copied: dict[str, Any]) -> None:
        self.reach("heal.swap")
        self._lines.write(self.state.restore(copied, self.worker_id, self._roster))
        if "bulk" in copied or "modules" in copied:
            self._checks.state_replaced(self.state.name.step)
            for model in self.inputs.models:
                model.state_replaced()

    # -- collectives outside steps

    def allreduce(self, tensor: torch.Tensor, op: ReduceOp) -> torch.Tensor:
        """Returns the reduction of `tensor` over the workers that take part. See bagua_core.allreduce."""
        if self._outside is not None:
            return self._outside.allreduce(tensor, op)
        check_reducible(tensor.dtype, op)
        return tensor.clone()

    def operation_done(self, index: int) -> None:
        """Commits collective `index` after the last step, which all members but joiners completed."""
        # Newcomers did not take part, but without the state they cannot undo anything either.
        self._release(self.state.name.step + 1, frozenset())
        self.state.operation_committed(self.generation_number, index)
        if self._reports is not None:
            self._reports.entered(self.state.name.step)
        self.reach("outside.done")

    # -- the end

    def finish(self) -> bool:
        """Commits the step under way, then waits until every member has committed it too.

        Returns False if meanwhile the job went elsewhere with this worker (it was left out and joined again): the
        source's position says where, and there is more to do.
        """
        self.state.guard.check()
        if self.states.phase is Phase.ENDED:
            return True
        step = self.state.name.step
        if self.in_step:
            self._end_step()
            if self.rounds is not None and self.state.name.step == step:
                self.boundary()  # the members that are left repeat the average, before the collectives of the end
        self.state.owes_epoch_end = False  # the collectives of the end show as much
        member = self.member
        if member is not None and member.generation is not None:
            assert self._outside is not None and self._reports is not None and self._checkpoints is not None
            if self.copying is not None:
                try:  # a copy that would have run beside the next step, were there one
                    self.copying.finish(self._is_newcomer)
                except CollectiveFailed as error:
                    member.break_generation(error)
            steps = self.state.name.step
            if self.global_rank in self.newcomers:
                # It came for a step that the job did not need any more.
                try:
                    member.wait_closed()
                except (SystemExit, KeyboardInterrupt):
                    self._ended = True
                    raise
                self.states.take(Event.FINISH)
                return True
            outside = self._outside
            for model in self.inputs.models:
                model.finish(
                    lambda tensor: outside.operate(tensor, ReduceOp.AVG, finishing=True, across_replicas=True)
                )
            # Two: a rank that completes the first knows that everyone has the last step, and writes its line; one that
            # completes the second knows that everyone has written. Digests are of the last step's state, so in the
            # second.
            outside.operate(torch.zeros(1, dtype=torch.float32, device="cpu"), ReduceOp.SUM, finishing=True)
            digests = outside.gather_at_end(self._checkpoints.digests())
            if not member.is_closed and (member.generation is None or self.state.name.step != steps):
                self.boundary()
                return False
            self._checkpoints.finish(*self.replica_place(), digests)
            self.reach("finish.done")
            self._reports.training_done(self.state.name.step)
        self.states.take(Event.FINISH)
        return True

    def end_training(self) -> None:
        """Commits the step under way and ends the training; in a job, once all members have. The session with the agent
        stays until the process ends: by it the agent knows that the worker lives."""
        member = self.member
        if member is None or (member.generation is not None and not self._is_gathered):
            while not self.finish():
                continue  # left out and taken in again meanwhile: the members that it meets now end as well
        self.inputs.release(self)

    def shutdown(self, exit_code: int) -> bool:
        """Ends this process's part in the job, and tells whether it must end by os._exit. See runtime.shutdown."""
        member = self.member
        if member is None:
            return False
        if self._late_leave is not None:
            self._late_leave.close()
        is_over = self._ended or self.state.guard.is_taken_out or self.states.phase is Phase.ENDED
        if exit_code == 0 and not is_over and member.generation is not None and not self._is_gathered:
            self.finish()
        if not self._is_gathered:
            self._report_progress()
        if self._checkpoints is not None:
            self._checkpoints.close()
        self._early_end.close()
        member.close(in_order=exit_code == 0 or is_over)
        return True
