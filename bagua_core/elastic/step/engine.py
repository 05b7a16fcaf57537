"""The boundary of a step: commits what is final, rolls back what is not, and follows changes of membership.

Owns the step under way; its states are step_states.py's. What is committed is committed_state.py's; copies are
copying.py's, the script's own collectives outside_collectives.py's; where the job goes is member.py, which ledger lines
are due commit_history.py. Everything runs in the script's thread.

The *resume point* of a step is where the script goes on when the step is done again: the loader's yield, or the return
of next_step(). What a failed step changed goes back to its values there.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import torch
from torch.amp.grad_scaler import GradScaler
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from bagua_contract import membership_pb2
from bagua_contract.environment import WorkerEnvironment
from bagua_contract.records import Generation
from bagua_core.communication.communicator import (
    CollectiveAborted,
    CollectiveFailed,
    Communicator,
    Pending,
    ReduceOp,
)
from bagua_core.communication.step_interface import DataSource, MicroBatch, Model, Stateful, StepPlan
from bagua_core.communication.transports.gpu_in_use import gpus_of
from bagua_core.elastic.checkpoint.job_checkpoints import JobCheckpoints, settings_of
from bagua_core.elastic.failpoints import Failpoints
from bagua_core.elastic.heal.heal_plan import HealPlan
from bagua_core.elastic.ledger.ledger import LedgerWriter
from bagua_core.elastic.ledger.ledger_lines import LedgerLines
from bagua_core.elastic.membership import entry
from bagua_core.elastic.membership.agent_reports import AgentReports
from bagua_core.elastic.membership.member import Member
from bagua_core.elastic.script_collectives.before_loop import BeforeLoop
from bagua_core.elastic.script_collectives.default_group import forbid_default_group
from bagua_core.elastic.script_collectives.outside_collectives import OutsideCollectives, check_averages
from bagua_core.elastic.state.commit_history import Entry
from bagua_core.elastic.state.committed_state import CommittedState
from bagua_core.elastic.state.half_copy import HalfCopy
from bagua_core.elastic.step.copying import Copying
from bagua_core.elastic.step.late_leave import LateLeave
from bagua_core.elastic.step.late_leave_plan import FIRST_WRITE_S, Form, LeaveSituation, part_of
from bagua_core.elastic.step.replica_checks import ReplicaChecks
from bagua_core.elastic.step.step_seed import seed_generators
from bagua_core.elastic.step.step_states import Event, Phase, StepStates
from bagua_core.elastic.waiting.operation_trail import BOUNDARY, COMPARISON, STEP
from bagua_core.optimizers.optimizer_gate import gate_scaler, gate_scheduler


class OutsideStepError(RuntimeError):
    """Gradients were computed where no step is under way."""


class UnfinishedBackward(RuntimeError):
    """The script went on after an exception in backward."""


class SecondLoaderError(RuntimeError):
    """Two loaders in one job: one of them defines the steps."""


class Engine:
    """One per process. environment None: a world of one, not launched."""

    def __init__(self, environment: WorkerEnvironment | None) -> None:
        self.state = CommittedState()
        self.registry = self.state.registry
        self.metrics: dict[str, float] = {}
        self._environment = environment
        self._models: list[Model] = []
        self._source: DataSource | None = None
        self._seed: int | None = None  # the script's; None until the first boundary

        self._job_step = 0
        self._workers: tuple[str, ...] = ("",)
        self._roster: dict[str, int] = {}
        self._ended = False  # the process leaves the job

        # the step under way
        self._step = StepStates()
        self._plan = StepPlan(0, 0, 0, 1)
        self._micro_batch = MicroBatch(1.0, True)
        self._announced = MicroBatch(1.0, True)  # what a step that next_step() announced begins with
        self._failure: Exception | None = None  # why the step failed
        self._part = 0  # optimizer steps of this step so far
        self._most_parts = 0  # in any step that was committed here
        # ranks that joined with this generation, until its first commit: they copy the state beside the first step,
        # and take part in nothing before it
        self._newcomers: frozenset[int] = frozenset()
        self._joining = False  # this worker is one of them, or was when it last took part

        self._step_from_s = 0.0
        self._failpoints = Failpoints()
        writer: LedgerWriter | None = None
        if environment is not None:
            self._failpoints = Failpoints(environment.failpoints, environment.slot)
            if environment.ledger_dir:
                writer = LedgerWriter(environment.ledger_dir, environment.worker_id, self._say)
        self._lines = LedgerLines(writer, self.reach)
        self._member: Member | None = None
        self._copying: Copying | None = None
        self._before_loop: BeforeLoop | None = None
        self._outside: OutsideCollectives | None = None
        self._reports: AgentReports | None = None
        self._checkpoints: JobCheckpoints | None = None
        self._late_leave: LateLeave | None = None
        self._leaves = False  # the script's thread leaves by itself
        if environment is not None:
            member = self._member = Member(environment, self)
            self._copying = Copying(self.state, member, self._swap_in, self.reach, self._say)
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
            self._parameters,
            lambda pending: self._wait_in(pending, COMPARISON),
            self._reports,
        )
        if self._member is not None:  # last: its thread may begin at once
            self._late_leave = LateLeave(self, self.state.guard, self._member.session)

    # -- what this worker is now

    @property
    def launched(self) -> bool:
        return self._member is not None

    @property
    def generation_number(self) -> int:
        return self._member.number if self._member else 0

    @property
    def global_rank(self) -> int:
        communicator = self.communicator()
        return communicator.global_rank if communicator else 0

    @property
    def world_size(self) -> int:
        communicator = self.communicator()
        return communicator.world_size if communicator else 1

    def place_of_script(self) -> tuple[int, int]:
        """Rank and world size as the script should see them: between steps, those of the collectives that it can
        take part in there, which leave joiners out until their first step. Before the loop, see before_loop.py."""
        if self._before_loop is not None:
            self._before_loop.join()
            late = self._before_loop.place()
            if late is not None:
                return late
        if self.in_step or not self._newcomers:
            return self.global_rank, self.world_size
        if self.global_rank in self._newcomers:
            return 0, 1
        before = sum(1 for r in self._newcomers if r < self.global_rank)
        return self.global_rank - before, self.world_size - len(self._newcomers)

    def join_before_loop(self) -> None:
        """Have ranks from now on, if this process was launched."""
        if self._before_loop is not None:
            self._before_loop.join()

    @property
    def _is_gathered(self) -> bool:
        """In a generation that has no state."""
        member = self._member
        return member is not None and member.generation is not None and member.generation.is_gathering

    @property
    def local_rank(self) -> int:
        return self._environment.local_rank if self._environment else 0

    @property
    def _worker_id(self) -> str:
        return self._environment.worker_id if self._environment else ""

    @property
    def step_failed(self) -> bool:
        return self._step.phase is Phase.FAILED

    @property
    def in_step(self) -> bool:
        return self._step.in_step

    @property
    def is_final(self) -> bool:
        """The latest reduction of this step is in: unless something of it fails later, it is committed."""
        return self._step.phase is Phase.FINAL

    @property
    def newcomers(self) -> frozenset[int]:
        return self._newcomers

    @property
    def micro_batch(self) -> MicroBatch:
        if not self.in_step and self.launched:
            raise OutsideStepError(
                "gradients were computed outside a step; draw batches from bagua.ElasticDataLoader, "
                "or call bagua.next_step() at the top of the loop"
            )
        return self._micro_batch

    @property
    def plan(self) -> StepPlan:
        return self._plan

    @property
    def collectives(self) -> OutsideCollectives | None:
        """The script's own; None under plain `python`."""
        return self._outside

    def communicator(self) -> Communicator | None:
        return self._member.communicator if self._member else None

    def reach(self, point: str) -> None:
        self._failpoints.reach(point, self.state.name.step)

    def _say(self, text: str) -> None:
        print(f"bagua: {text}", file=sys.stderr, flush=True)

    # -- what the script and the loader bring

    def attach_source(self, source: DataSource) -> None:
        if self._source is source:
            return
        if self._source is not None and (self.in_step or self.state.name.step):
            raise SecondLoaderError(
                "a second ElasticDataLoader was iterated; one loader defines the job's steps. "
                "Use a plain torch DataLoader for evaluation"
            )
        self._source = self._lines.source = source
        self._seed = int(source.fingerprint().get("seed", "0"))
        source.seek(self.state.position)

    def seed(self, seed: int) -> None:
        """What a step's random numbers follow from, unless a loader brings a seed of its own."""
        if self._source is None:
            self._seed = seed

    def attach_model(self, model: Model) -> None:
        self._models.append(model)
        self.registry.add_model(
            model.module, model.optimizers, model.travelling, model.equal_states, model.put_gradient
        )
        if self._member is not None:
            self._member.rendezvous.lanes |= model.lanes
            self._note_gpus(self._member)

    def detach_model(self, model: Model) -> None:
        """See StepEngine."""
        self._models.remove(model)
        self.registry.remove_model(model.module, [o for other in self._models for o in other.optimizers])

    def _note_gpus(self, member: Member) -> None:
        """What generations that are built from now on should reach."""
        member.rendezvous.gpus = gpus_of(p for module in self.registry.modules for p in module.parameters())

    def register_state(self, name: str, stateful: Stateful) -> None:
        self.registry.register(name, stateful)
        if isinstance(stateful, (LRScheduler, ReduceLROnPlateau)):
            gate_scheduler(stateful, self)
        elif isinstance(stateful, GradScaler):
            gate_scaler(stateful, self)

    def fingerprint(self) -> dict[str, str]:
        self.registry.check_travels()
        source = self._source.fingerprint() if self._source else {"loader": "none"}
        return {
            **self.registry.fingerprint(),
            **source,
            "algorithm": ", ".join(m.algorithm_name for m in self._models) or "none",
            "torch": ".".join(torch.__version__.split(".")[:2]),
        }

    # -- the boundary

    def boundary(self) -> StepPlan:
        """See StepEngine. Calling it again before the step has begun returns the plan in force by then."""
        self.state.guard.check()
        if self._before_loop is not None:
            self._before_loop.boundary()
        if self.in_step:
            self._end_step()
        if self._seed is None:
            self._seed = torch.initial_seed()
        if self._member is not None:
            forbid_default_group()
            if not self._member.rendezvous.gpus or self._member.generation is None or self._is_gathered:
                self._note_gpus(self._member)  # models may have been moved, or there are none
            try:
                self._follow(self._member)
            except (SystemExit, KeyboardInterrupt):
                self._ended = True
                raise
        # One that copies the state beside the step does not have it yet, but takes part in this very step.
        step = self._job_step if self.global_rank in self._newcomers else self.state.name.step
        self._plan = StepPlan(
            self.generation_number, step, self.global_rank, self.world_size, self._newcomers
        )
        self._step_from_s = time.monotonic()
        if self._member is not None:
            self._member.waited_s = 0.0
        return self._plan

    def _follow(self, member: Member) -> None:
        """To the generation in force. At an epoch's end not before all workers have its last step: what the script
        does between two epochs is done once by each of them, so no worker may copy it from another."""
        assert self._outside is not None
        saves = self._checkpoints is not None and self._checkpoints.is_on
        if saves and self._owes_epoch_end() and member.is_to_step_aside:
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

    def _owes_epoch_end(self) -> bool:
        """A joiner takes part in nothing before its first step, even if the state that it copied at once owes it."""
        return self.state.owes_epoch_end and not self._is_newcomer

    @property
    def _is_newcomer(self) -> bool:
        return self.global_rank in self._newcomers

    def begin_micro_batch(self, micro_batch: MicroBatch) -> None:
        self._micro_batch = micro_batch
        if self.in_step:
            return
        if not self.state.resume_point_is_current:
            self._resume_point()
        self._seed_generators()
        self._step.take(Event.BEGIN, f"step {self._plan.step} of generation {self._plan.generation}")
        self._part = 0
        self._failure = None
        member = self._member
        if member is not None:
            member.agreed = None
            if member.broken or member.number != self._plan.generation:
                self._fail(CollectiveAborted("the generation changed before the step began"))
            elif self._copying is not None:
                self._copying.step_begins()
        self.reach("step.begin")

    def _resume_point(self) -> None:
        """What the script did since the last commit is part of the state now, and of the checkpoint that is due."""
        with self.state.guard.held():
            if self.state.owes_checkpoint and self._checkpoints is not None:
                self.state.owes_checkpoint = False
                if self._plan.active_index is not None:
                    self._checkpoints.write(self._plan.active_index, self._plan.active_count)
            self.registry.snapshot()
            self.state.resume_point_is_current = True

    def _seed_generators(self) -> None:
        seed_generators(self._seed or 0, self._plan.step, self._plan.global_rank)

    def next_step(self, resumes_here: bool = True) -> int:
        """Boundary of loops without the loader; returns the number of steps committed so far.

        resumes_here: when the step is done again, so is what the script does from here to the first forward.
        """
        if self._step.phase is Phase.ANNOUNCED:
            self.begin_micro_batch(self._announced)  # its body trained nothing, and counts all the same
        plan = self.boundary()
        weight = 0.0 if plan.active_index is None else 1.0 / plan.active_count
        self._announced = MicroBatch(weight, True)
        if resumes_here:
            self._resume_point()
        self._seed_generators()
        if self._models:
            self._step.take(Event.ANNOUNCE)
        else:
            self.begin_micro_batch(self._announced)
        return plan.step

    def forward_begins(self) -> None:
        """A model is about to compute gradients: the step that next_step() announced begins. After the last one the
        loop ends instead, and what follows is outside steps."""
        if self._step.phase is Phase.ANNOUNCED:
            self.begin_micro_batch(self._announced)

    def backward_begins(self) -> None:
        """See StepEngine."""
        if self.in_step and self.launched:
            self.registry.backward_begins()

    def _end_step(self) -> None:
        if not self.step_failed and any(model.is_unfinished for model in self._models):
            # Peers may be in the middle of its buckets: no other collective can follow.
            self.reduction_failed(UnfinishedBackward("a backward pass of this step was not finished"))
        if self._step.phase is Phase.RUNNING:
            self._reduce_pair_alone()
        if self.is_final:
            self.reach("commit.before")
            self._commit()
            self.reach("commit.after")
        else:
            self._roll_back()

    def _roll_back(self) -> None:
        why, self._failure = self._failure, None
        guard = self.state.guard
        with guard.held():
            self.state.resume_point_is_current = guard.stepping = guard.provisional = False
            unknown = self.registry.roll_back()
            for model in self._models:
                model.step_rolled_back()
            self.registry.roll_back_gradients()
            if self._source is not None:
                self._source.seek(self.state.position)
            self._newcomers = frozenset()
            self._drop_copy()
            self._step.take(Event.ROLL_BACK)
        self._say(f"step {self.state.name.step} in generation {self._plan.generation} did not happen: {why}")
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
        with self.state.guard.held():
            self._commit_here()
        state = self.state
        if self._reports is None or self._member is None:
            return
        self._reports.entered(state.name.step)
        if self._reports.is_progress_due():
            self._report_progress()
        self._checks.after_commit(self._member, state.name.step)
        if self._checkpoints is not None:
            state.owes_checkpoint |= self._checkpoints.is_due()

    def _commit_here(self) -> None:
        """The part of a commit that needs no other worker. Under the guard."""
        state = self.state
        state.resume_point_is_current = state.guard.stepping = False
        self._most_parts = max(self._most_parts, self._part, state.final_parts)
        self.registry.step_committed()
        if self._member is not None and not self._plan.healing:
            self._checks.step_timed(time.monotonic() - self._step_from_s, self._member.waited_s)
        state.history = state.history.committed(
            Entry(
                generation=self._plan.generation,
                step=state.name.step + 1,
                position=tuple(sorted(state.position.items())),
                workers=self._workers,
                healing=self._plan.healing,
                time_s=time.time(),
                job=self._lines.job,
            )
        )
        epoch = state.position["epoch"]
        if self._source is not None:
            state.position = dict(self._source.after(state.position))
            self._source.seek(state.position)
        state.step_committed(self.generation_number)
        if self._member is not None:
            self._member.trail.at(state.name.step)
        state.owes_epoch_end = self._member is not None and state.position["epoch"] != epoch
        for model in self._models:
            model.step_committed()
        state.guard.provisional = False  # what the models' exchanges changed is final
        self._newcomers = frozenset()
        self._joining = False
        self._drop_copy()
        self._step.take(Event.COMMIT)

    def _parameters(self) -> list[torch.nn.Parameter]:
        """What must be the same on all ranks: the very ones, whatever memory a script gives them later."""
        if not self.registry.equal_states:
            return []
        return [p for module in self.registry.modules for p in module.parameters()]

    def _report_progress(self) -> None:
        if self._reports is not None:
            self._reports.progress(
                self.state.name.step,
                self.state.position["epoch"],
                # what a joiner computed beside the copy, with parameters of its own, says nothing of the job
                {} if self._plan.global_rank in self._plan.healing else self.metrics,
            )

    def _reduce_pair_alone(self) -> None:
        """A step that reduced no gradients commits all the same, by the pair alone."""
        communicator = self.communicator()
        if communicator is None:
            self.reduction_done(None)
            return
        v = self.switch_value()
        pair = torch.tensor([v, v * v], dtype=torch.float32)
        try:
            self._wait_in(communicator.allreduce(pair), BOUNDARY)
        except CollectiveFailed as error:
            self.reduction_failed(error)
        else:
            self.reduction_done((float(pair[0]), float(pair[1])))

    # -- the step's reductions

    def switch_value(self) -> float:
        self.reach("reduction.before")  # read once, when the step's last reduction is about to start
        return self._member.switch_value() if self._member else 0.0

    def wait(self, pending: Pending) -> None:
        if self._part and self.is_final and not self.state.guard.stepping:
            self.registry.boundary.goes_on()
        self._wait_in(pending, STEP)

    def _wait_in(self, pending: Pending, what: str) -> None:
        if self._member is not None:
            self._member.wait(pending, what)
        else:
            pending.wait()

    def takes_optimizer_step(self, final: bool = True) -> bool:
        """Several optimizer steps in one step are parts of it. With a copy of the boundary they are undone if the step
        fails later. Without one each is final once its own reduction succeeded: when the step is done again, it is not.
        final False: the part has further reductions."""
        self._part += 1
        if self._part <= self.state.final_parts:
            return False
        self._end_reading()
        with self.state.guard.held():
            self.state.guard.stepping = True
            if final:
                self.optimizer_step_is_final()
        return True

    def optimizer_step_is_final(self) -> None:
        """See StepEngine."""
        if not self.registry.boundary.is_kept:
            self.state.part_committed(self.generation_number, self._part)

    def optimizer_stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """See StepEngine. What a roll-back gives back must not undo a part of the step that is final."""
        with self.state.guard.held():
            self.state.guard.stepping = False
            if self.step_failed:
                self.registry.protect()  # it failed in the optimizer's step, which was undone: so are these values now
            else:
                self.registry.stepped(optimizer)

    def parameters_change(self) -> None:
        """See StepEngine."""
        self._end_reading()
        with self.state.guard.held():
            self.state.guard.provisional = True

    def _end_reading(self) -> None:
        """Wait until copies of the state that are being sent to others no longer read the parameters."""
        if self._copying is None or self.global_rank in self._newcomers:
            return
        try:
            self._copying.sent()
        except CollectiveFailed as error:
            # This step's reduction is in, so the step is final here; only the generation is not.
            assert self._member is not None
            self._member.break_generation(error)

    def reduction_done(self, pair: tuple[float, float] | None) -> None:
        self.reach("reduction.done")
        copying = self._copying
        swaps_in = copying is not None and self.global_rank in self._newcomers and copying.is_under_way
        if copying is not None and swaps_in:
            try:
                copying.swap_in()
            except CollectiveFailed as error:
                self.reduction_failed(error)
                return
        is_first = self._step.phase is Phase.RUNNING
        with self.state.guard.held():
            if is_first and not swaps_in:
                self.registry.find_changed()
                if copying is not None:
                    copying.reduced()
            if self.in_step:  # under plain `python` a script may train without steps
                self._step.take(Event.REDUCE)
        if is_first:
            self._end_reading()  # from here on the script may change parameters
            with self.state.guard.held():
                self.registry.first_reduced()
        elif not self.state.guard.stepping and self.registry.boundary.is_moved():
            self.registry.boundary.goes_on()
        if pair is not None and self._member is not None:
            self._member.pair_reduced(pair)
        self._release(self.state.name.step + 1, self._newcomers)

    def reduction_failed(self, error: Exception) -> None:
        self._fail(error)
        if self._member is not None:
            self._member.break_generation(error)

    def _fail(self, error: Exception) -> None:
        with self.state.guard.held():
            if not self.step_failed:
                self._failure = error
                self.registry.protect()
            self._step.take(Event.FAIL, str(error)[:80])

    # -- entering a generation (called by the member)

    def info(self) -> entry.Info:
        state = self.state
        stages = self._copying is None or self._copying.stages()
        return entry.Info(
            state.name,
            state.operations.is_running,
            state.position,
            stages,
            state.half,
            self.registry.equal_states,
            0 if state.name.is_none or not self.registry.equal_states else state.layout(),
            self._joining and not state.name.is_none,
            state.final_parts,
        )

    def stepped_out(self, left: Generation, *, keeps_state: bool, together: bool) -> None:
        """See member.Host. The last checkpoint is cut in stripes if all members have the same state, else each that is
        left writes the whole."""
        with self.state.guard.held():
            self._drop_copy()
            if left.is_gathering:
                self.state.operations.clear()
            elif not keeps_state:
                self.state.forget()
            elif self._checkpoints is not None and self._member is not None:
                place = left.placement_of(self._worker_id)
                stripes = place is not None and together and not self._newcomers
                part = (place.global_rank, left.world_size) if place and stripes else (0, 1)
                self._checkpoints.step_aside(left, *part, self._member.session.news.leave_by_s)
            self._newcomers = frozenset()
        for model in self._models:
            model.communicator_changed()

    def before_leaving(self) -> membership_pb2.LastCheckpoint | None:
        with self.state.guard.held():
            self._leaves = True
        if self._checkpoints is None or self._member is None:
            return None
        return self._checkpoints.before_leaving(self._member.session.news.leave_by_s)

    # -- leaving outside the loop (called by late_leave.py's thread)

    def late_situation(self, left_s: float) -> tuple[LeaveSituation, bool]:
        """See late_leave.Host."""
        state, member, checkpoints = self.state, self._member, self._checkpoints
        assert member is not None and checkpoints is not None
        news, current = member.session.news, member.generation
        newest = news.generation
        goes_on_without = 0
        if newest is not None and newest.members and newest.placement_of(self._worker_id) is None:
            goes_on_without = newest.number if newest.number > member.number else 0
        expected_s = checkpoints.expected_write_s
        situation = LeaveSituation(
            left_s=left_s,
            expected_write_s=expected_s or FIRST_WRITE_S,
            saves=checkpoints.is_on,
            over=news.close or self._leaves or self._step.phase is Phase.ENDED,
            at_boundary=member.at_boundary and current is None,
            committed=not state.name.is_none and not self._joining,
            trained=state.name.step > 0,
            joining=self._joining or (current is not None and current.base > 0),
            goes_on_without=goes_on_without,
            phase=self._step.phase,
            resume_point=state.resume_point_is_current,
            backward_open=any(model.is_unfinished for model in self._models),
            stepping=state.guard.stepping,
            provisional=state.guard.provisional,
            parts=max(state.final_parts, self._part if self.in_step else 0),
            most_parts=self._most_parts,
            only_optimizers_change=all(model.optimizers for model in self._models)
            and (self.registry.boundary.is_kept or not self.registry.boundary.is_moved()),
        )
        return situation, bool(expected_s)

    def begin_last_write(self, form: Form, leave_by_s: float) -> None:
        """See late_leave.Host."""
        member, checkpoints = self._member, self._checkpoints
        assert member is not None and checkpoints is not None and member.generation is not None
        if form is Form.AFTER_COMMIT:
            self._commit_here()
        current = member.generation
        part = part_of(
            self._worker_id,
            current,
            member.session.news.generation,
            broken=member.broken,
            copied=bool(self._newcomers),
        )
        at_resume_point = form is Form.AT_RESUME_POINT
        checkpoints.step_aside(current, *part, leave_by_s, at_resume_point=at_resume_point)

    def end_last_write(self, leave_by_s: float, problem: str) -> membership_pb2.LastCheckpoint | None:
        """See late_leave.Host."""
        assert self._checkpoints is not None
        return self._checkpoints.before_leaving(leave_by_s, problem)

    def without_write(self) -> membership_pb2.LastCheckpoint | None:
        """See late_leave.Host. One that holds no state says so: there may be records, but nothing was committed."""
        never_had_any = self.state.name.is_none and self.state.half is HalfCopy.NONE
        return membership_pb2.LastCheckpoint() if never_had_any else None

    def take_part(self, generation: Generation, plan: HealPlan, infos: list[entry.Info]) -> None:
        communicator = self.communicator()
        assert communicator is not None and self._copying is not None and self._checkpoints is not None
        assert self._member is not None
        self._newcomers, self._joining = frozenset(), False
        if generation.is_gathering:
            self._member.trail.at(0)
            return
        self._lines.job = generation.nonce
        plan, infos = self._checkpoints.resume(generation, plan, infos)
        self._newcomers = plan.newcomers
        self._joining = communicator.global_rank in plan.newcomers
        self._checks.generation_entered()
        self._workers = tuple(m.worker_id for m in generation.members)
        self._roster = {m.worker_id: m.since_generation for m in generation.members}
        self._drop_copy()
        self._lines.write(self.state.history.entered(self._worker_id, self._roster))
        position = dict(infos[plan.holders[0]].position)
        self._job_step = plan.furthest.step
        self._copying.enter(communicator, plan)
        self.state.position = position
        if self._source is not None:
            self._source.seek(position)
        for model in self._models:
            model.communicator_changed()
        if not self._joining:
            self._member.trail.at(self.state.name.step)

    def _swap_in(self, copied: dict[str, Any]) -> None:
        self.reach("heal.swap")
        self._lines.write(self.state.restore(copied, self._worker_id, self._roster))
        if "bulk" in copied or "modules" in copied:
            self._checks.state_replaced(self.state.name.step)

    def _drop_copy(self) -> None:
        if self._copying is not None:
            self._copying.drop()

    # -- collectives outside steps

    def allreduce(self, tensor: torch.Tensor, op: ReduceOp) -> torch.Tensor:
        """See bagua_core.allreduce."""
        if self._outside is not None:
            return self._outside.allreduce(tensor, op)
        check_averages(tensor, op)
        return tensor.clone()

    def operation_done(self, index: int) -> None:
        """See outside_collectives.Steps."""
        # Newcomers did not take part, but without the state they cannot undo anything either.
        self._release(self.state.name.step + 1, frozenset())
        self.state.operation_committed(self.generation_number, index)
        if self._reports is not None:
            self._reports.entered(self.state.name.step)
        self.reach("outside.done")

    # -- the end

    def finish(self) -> bool:
        """Commit the step under way, then wait until every member has committed it too.

        False: meanwhile the job went elsewhere with this worker (it was left out and joined again): the
        source's position says where, and there is more to do.
        """
        self.state.guard.check()
        if self._step.phase is Phase.ENDED:
            return True
        if self.in_step:
            self._end_step()
        self.state.owes_epoch_end = False  # the collectives of the end show as much
        member = self._member
        if member is not None and member.generation is not None:
            assert self._outside is not None and self._reports is not None
            self._finish_copy()
            steps = self.state.name.step
            if self.global_rank in self._newcomers:
                # It came for a step that the job did not need any more.
                member.wait_closed()
                self._step.take(Event.FINISH)
                return True
            outside = self._outside
            for model in self._models:
                model.finish(lambda tensor: outside.operate(tensor, ReduceOp.AVG, finishing=True))
            # Twice: a rank that completes the first knows that everyone has the last step, and writes its line; one
            # that completes the second knows that everyone has written.
            for _ in range(2):
                outside.operate(torch.zeros(1), ReduceOp.SUM, finishing=True)
            if not member.is_closed and (member.generation is None or self.state.name.step != steps):
                self.boundary()
                return False
            if self._checkpoints is not None:
                self._checkpoints.finish(*self.place_of_script())
            self.reach("finish.done")
            self._reports.training_done(self.state.name.step)
        self._step.take(Event.FINISH)
        return True

    def _finish_copy(self) -> None:
        """A copy that would have run beside the next step, were there one."""
        copying = self._copying
        if copying is None:
            return
        try:
            if self.global_rank in self._newcomers and copying.is_under_way:
                copying.swap_in()
            else:
                copying.step_begins()
                copying.reduced()
                copying.sent()
        except CollectiveFailed as error:
            assert self._member is not None
            self._member.break_generation(error)

    def shutdown(self, exit_code: int) -> bool:
        """See runtime.shutdown."""
        member = self._member
        if member is None:
            return False
        if self._late_leave is not None:
            self._late_leave.close()
        is_over = self._ended or self.state.guard.is_taken_out or self._step.phase is Phase.ENDED
        if exit_code == 0 and not is_over and member.generation is not None and not self._is_gathered:
            self.finish()
        if not self._is_gathered:
            self._report_progress()
        if self._checkpoints is not None:
            self._checkpoints.close()
        member.session.close()
        return True

    def _release(self, step: int, healing: frozenset[int]) -> None:
        """A collective of all members completed: lines that can't be undone any more are written."""
        state = self.state
        state.history, due = state.history.collective_completed(step, healing, self._worker_id, self._roster)
        self._lines.write(due)
