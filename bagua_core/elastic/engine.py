"""When is a step final on this worker, and what is undone when it is not?

Owns the name of this worker's state, the step under way and the copies made in it. Where the job goes is
member.py; who copies from whom heal_plan.py; which ledger lines are due commit_history.py. Everything runs in the
script's thread.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable
from typing import Any

import torch
from torch.amp.grad_scaler import GradScaler
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from bagua_contract.environment import WorkerEnvironment
from bagua_contract.records import Generation, StateName
from bagua_core.communication.communicator import (
    CollectiveAborted,
    CollectiveFailed,
    Communicator,
    Pending,
    ReduceOp,
)
from bagua_core.elastic import entry, heal, operations
from bagua_core.elastic.commit_history import Entry, History, Line
from bagua_core.elastic.digest_check import DigestCheck
from bagua_core.elastic.failpoints import Failpoints
from bagua_core.elastic.heal_plan import HealPlan
from bagua_core.elastic.ledger import LedgerLine, LedgerWriter
from bagua_core.elastic.member import Member
from bagua_core.elastic.state_registry import Stateful, StateRegistry
from bagua_core.elastic.step_interface import DataSource, MicroBatch, Model, StepPlan
from bagua_core.elastic.step_seed import seed_generators
from bagua_core.elastic.step_timing import Pace
from bagua_core.optimizer_gate import gate_scaler, gate_scheduler

PROGRESS_EVERY_S = 0.25


class OutsideStepError(RuntimeError):
    """Gradients were computed where no step is under way."""


class UnfinishedBackward(RuntimeError):
    """The script went on after an exception in backward."""


class SecondLoaderError(RuntimeError):
    """Two loaders in one job: one of them defines the steps."""


class Engine:
    """One per process. environment None: a world of one, not launched."""

    def __init__(self, environment: WorkerEnvironment | None) -> None:
        self.registry = StateRegistry()
        self.operations = operations.OperationLog()
        self.metrics: dict[str, float] = {}
        self._environment = environment
        self._models: list[Model] = []
        self._source: DataSource | None = None
        self._seed = 0

        # what is committed here
        self._name = StateName()
        self._position = {"epoch": 0, "batch": 0}
        self._job_step = 0
        self._history = History()
        self._workers: tuple[str, ...] = ("",)
        self._roster: dict[str, int] = {}
        self._entered_reported = 0
        self._finished = False
        self._ended = False

        # the step under way
        self._plan = StepPlan(0, 0, 0, 1)
        self._micro_batch = MicroBatch(1.0, True)
        self._armed: MicroBatch | None = None
        self._step_begun = False
        self._failed: Exception | None = None
        self._reduced = False
        self._part = 0  # optimizer steps of this step so far
        self._final_parts = 0  # those that are final although the step failed later
        self._healing: frozenset[int] = frozenset()
        self._newcomers: frozenset[int] = frozenset()
        self._transfer: heal.Transfer | None = None

        self._pace = Pace(PROGRESS_EVERY_S)
        self._digest_check = DigestCheck(environment.digest_every_steps if environment else 0)
        self._ledger: LedgerWriter | None = None
        self._failpoints = Failpoints()
        self._member: Member | None = None
        if environment is not None:
            self._failpoints = Failpoints(environment.failpoints, environment.slot)
            if environment.ledger_dir:
                self._ledger = LedgerWriter(environment.ledger_dir, environment.worker_id, self._say)
            self._member = Member(environment, self)

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
        take part in there, which leave newcomers out until their first step."""
        if self._step_begun or not self._newcomers:
            return self.global_rank, self.world_size
        if self.global_rank in self._newcomers:
            return 0, 1
        before = sum(1 for r in self._newcomers if r < self.global_rank)
        return self.global_rank - before, self.world_size - len(self._newcomers)

    @property
    def local_rank(self) -> int:
        return self._environment.slot if self._environment else 0

    @property
    def _worker_id(self) -> str:
        return self._environment.worker_id if self._environment else ""

    @property
    def step_failed(self) -> bool:
        return self._failed is not None

    @property
    def in_step(self) -> bool:
        return self._step_begun

    @property
    def micro_batch(self) -> MicroBatch:
        if not self._step_begun and self.launched:
            raise OutsideStepError(
                "gradients were computed outside a step; draw batches from bagua.ElasticDataLoader, "
                "or call bagua.next_step() at the top of the loop"
            )
        return self._micro_batch

    @property
    def plan(self) -> StepPlan:
        return self._plan

    def communicator(self) -> Communicator | None:
        return self._member.communicator if self._member else None

    def reach(self, point: str) -> None:
        self._failpoints.reach(point, self._name.step)

    def _say(self, text: str) -> None:
        print(f"bagua: {text}", file=sys.stderr, flush=True)

    # -- what the script and the loader bring

    def attach_source(self, source: DataSource) -> None:
        if self._source is source:
            return
        if self._source is not None and (self._step_begun or self._name.step):
            raise SecondLoaderError(
                "a second ElasticDataLoader was iterated; one loader defines the job's steps. "
                "Use a plain torch DataLoader for evaluation"
            )
        self._source = source
        self._seed = int(source.fingerprint().get("seed", "0"))
        source.seek(self._position)

    def attach_model(self, model: Model) -> None:
        self._models.append(model)
        self.registry.add_model(model.module, model.optimizers)

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
        if self._step_begun:
            self._end_step()
        if self._member is not None:
            try:
                self._member.follow()
            except SystemExit:
                self._ended = True
                raise
        # One that copies the state beside the step does not have it yet, but takes part in this very step.
        step = self._job_step if self.global_rank in self._healing else self._name.step
        self._plan = StepPlan(self.generation_number, step, self.global_rank, self.world_size, self._healing)
        return self._plan

    def begin_micro_batch(self, micro_batch: MicroBatch) -> None:
        self._micro_batch = micro_batch
        self._armed = None
        if self._step_begun:
            return
        seed_generators(self._seed, self._plan.step, self._plan.global_rank)
        self.registry.snapshot()
        self._step_begun = True
        self._reduced = False
        self._part = 0
        self._failed = None
        member = self._member
        if member is not None:
            member.agreed = None
            if member.broken or member.number != self._plan.generation:
                self._failed = CollectiveAborted("the generation changed before the step began")
        self.reach("step.begin")

    def next_step(self) -> int:
        """Boundary of loops without the loader; returns the number of steps committed so far."""
        if self._armed is not None:
            self.begin_micro_batch(self._armed)  # its body trained nothing, and counts all the same
        plan = self.boundary()
        weight = 0.0 if plan.active_index is None else 1.0 / plan.active_count
        self._armed = MicroBatch(weight, True)
        seed_generators(self._seed, plan.step, plan.global_rank)
        if not self._models:
            self.begin_micro_batch(self._armed)
        return plan.step

    def forward_begins(self) -> None:
        """A model is about to compute gradients: the step that next_step() announced begins. After the last one the
        loop ends instead, and what follows is outside steps."""
        if self._armed is not None and not self._step_begun:
            self.begin_micro_batch(self._armed)

    def _end_step(self) -> None:
        if self._failed is None and any(model.is_unfinished for model in self._models):
            # Peers may stand in the middle of its buckets: no other collective can follow.
            self.reduction_failed(UnfinishedBackward("a backward pass of this step was not finished"))
        if self._failed is None and not self._reduced and self.communicator() is not None:
            self._reduce_pair_alone()
        self._step_begun = False
        if self._failed is not None:
            self._roll_back(self._failed)
        else:
            self.reach("commit.before")
            self._commit()
            self.reach("commit.after")

    def _roll_back(self, why: Exception) -> None:
        self.registry.roll_back()
        for model in self._models:
            model.step_rolled_back()
        if self._source is not None:
            self._source.seek(self._position)
        self._healing = frozenset()
        self._transfer = None
        self._say(f"step {self._name.step} in generation {self._plan.generation} did not happen: {why}")

    def _commit(self) -> None:
        self._history = self._history.committed(
            Entry(
                generation=self._plan.generation,
                step=self._name.step + 1,
                position=tuple(sorted(self._position.items())),
                workers=self._workers,
                healing=self._plan.healing,
                time_s=time.time(),
            )
        )
        if self._source is not None:
            self._position = dict(self._source.after(self._position))
            self._source.seek(self._position)
        self._name = StateName(self.generation_number, self._name.step + 1, 0)
        self._final_parts = 0
        self.operations.clear()
        self._healing = self._newcomers = frozenset()
        self._transfer = None
        if self._member is None:
            return
        self._say_entered()
        if self._pace.step_done(time.monotonic()):
            self._report_progress()
        communicator = self.communicator()
        if communicator is not None and self._digest_check.is_due(self._name.step):
            try:
                self._digest_check.compare(
                    communicator, self.registry.parameters(), self._name.step, self.wait
                )
            except CollectiveFailed as error:
                self._member.break_generation(error)

    def _say_entered(self) -> None:
        """The first commit in a generation tells the job that this worker holds its state."""
        if self._member is not None and self._entered_reported != self._member.number:
            self._entered_reported = self._member.number
            self._member.first_commit_done()
            self._member.session.entered(self._member.number, self._name.step)

    def _report_progress(self) -> None:
        if self._member is not None:
            self._member.session.progress(
                self._member.number,
                self._name.step,
                self._position["epoch"],
                self._pace.steps_per_s,
                # what a newcomer computed beside the copy, with parameters of its own, says nothing of the job
                {} if self._plan.global_rank in self._plan.healing else self.metrics,
            )

    def _reduce_pair_alone(self) -> None:
        """A step that reduced no gradients commits all the same, by the pair alone."""
        communicator = self.communicator()
        assert communicator is not None
        v = self.switch_value()
        pair = torch.tensor([v, v * v], dtype=torch.float32)
        try:
            self.wait(communicator.allreduce(pair))
        except CollectiveFailed as error:
            self.reduction_failed(error)
        else:
            self.reduction_done((float(pair[0]), float(pair[1])))

    # -- the step's reductions

    def switch_value(self) -> float:
        self.reach("reduction.before")  # read once, when the step's last reduction is about to start
        return self._member.switch_value() if self._member else 0.0

    def wait(self, pending: Pending) -> None:
        if self._member is not None:
            self._member.wait(pending)
        else:
            pending.wait()

    def takes_optimizer_step(self) -> bool:
        """Several optimizer steps in one step are parts of it, each final once its own reduction succeeded: when the
        step is done again, those that are final already are not."""
        self._part += 1
        if self._part <= self._final_parts:
            return False
        self._before_optimizer_step()
        self._final_parts = self._part
        # A state between two steps: further than the last commit, behind the next.
        self._name = StateName(self.generation_number, self._name.step, self._name.operations + 1)
        return True

    def _before_optimizer_step(self) -> None:
        transfer = self._transfer
        if transfer is None or self.global_rank in self._healing:
            return
        try:
            self._await(transfer)
        except CollectiveFailed as error:
            # This step's reduction is in, so the step is final here; only the generation is not.
            assert self._member is not None
            self._member.break_generation(error)
        self._transfer = None

    def reduction_done(self, pair: tuple[float, float] | None) -> None:
        self.reach("reduction.done")
        if self.global_rank in self._healing and self._transfer is not None:
            try:
                self._await(self._transfer)
            except CollectiveFailed as error:
                self.reduction_failed(error)
                return
            self._swap_in(self._transfer.result)
            self._transfer = None
        self._reduced = True
        if pair is not None and self._member is not None:
            self._member.pair_reduced(pair)
        self._release(self._name.step + 1, self._healing)

    def broadcast_failed(self, error: Exception) -> None:
        """Buffers could not be shared before a forward. Once the step's reduction is in, that changes nothing of the
        step; a further reduction fails by itself, for the generation is broken."""
        if not self._reduced:
            self.reduction_failed(error)
        elif self._member is not None:
            self._member.break_generation(error)

    def reduction_failed(self, error: Exception) -> None:
        if self._failed is None:
            self._failed = error
        if self._member is not None:
            self._member.break_generation(error)

    # -- entering a generation (called by the member)

    def info(self) -> entry.Info:
        return entry.Info(self._name, self.operations.is_running, self._position)

    def stepped_out(self, *, keeps_state: bool) -> None:
        if not keeps_state:
            self._name = StateName()
            self._history = History()
            self.operations.forget()
            self._final_parts = 0
        self._healing = self._newcomers = frozenset()
        self._transfer = None
        for model in self._models:
            model.communicator_changed()

    def take_part(self, generation: Generation, plan: HealPlan, infos: list[entry.Info]) -> None:
        communicator = self.communicator()
        assert communicator is not None and self._member is not None
        own = communicator.global_rank
        self._newcomers = plan.newcomers
        self._healing = plan.beside
        behind, at_once, beside = plan.healing, tuple(sorted(plan.at_once)), tuple(sorted(plan.beside))
        self._transfer = None
        self._workers = tuple(m.worker_id for m in generation.members)
        self._roster = {m.worker_id: m.since_generation for m in generation.members}
        self._write(self._history.entered(self._worker_id, self._roster))
        position = dict(infos[plan.holders[0]].position)
        self._job_step = plan.furthest.step
        if own in plan.holders and behind:
            state = self._capture()
            if at_once:
                self._await(self._sending(communicator, state, plan, at_once))
            if beside:
                self._transfer = self._sending(communicator, state, plan, beside)
        elif own in behind:
            transfer = heal.Transfer(
                lambda: heal.receive_state(communicator, plan.holders), self._member.changed
            )
            self.reach("heal.receive")
            if own in at_once:
                self._await(transfer)
                self._swap_in(transfer.result)
            else:
                self._transfer = transfer
        self._position = position
        if self._source is not None:
            self._source.seek(position)
        for model in self._models:
            model.communicator_changed()

    def _sending(
        self, communicator: Communicator, state: Any, plan: HealPlan, receivers: tuple[int, ...]
    ) -> heal.Transfer:
        assert self._member is not None

        def send() -> None:
            self.reach("heal.send")
            heal.send_state(communicator, state, plan.holders, receivers)

        return heal.Transfer(send, self._member.changed)

    def _await(self, transfer: heal.Transfer) -> None:
        assert self._member is not None
        self._member.wait_for_transfer(lambda: transfer.done)
        if isinstance(transfer.error, CollectiveFailed):
            raise transfer.error
        if transfer.error is not None:
            raise transfer.error  # no peer's doing, so making the generation anew would not help

    def _capture(self) -> dict[str, Any]:
        state = self.registry.capture()
        # A forward pass may change buffers while the copy is under way; parameters wait for it.
        state["modules"] = [
            {n: t.clone() if n.startswith("buffer.") else t for n, t in tensors.items()}
            for tensors in state["modules"]
        ]
        state["name"] = [self._name.generation, self._name.step, self._name.operations]
        state["history"] = self._history.encode()
        state["operations"] = self.operations.results()
        state["final_parts"] = self._final_parts
        return state

    def _swap_in(self, state: dict[str, Any]) -> None:
        self.reach("heal.swap")
        self.registry.restore(state)
        same_step = self._name.step == state["name"][1]
        self._name = StateName(*state["name"])
        self._final_parts = state["final_parts"]
        self._history, due = History.decode(state["history"]).copied(self._worker_id, self._roster)
        self._write(due)
        self.operations.replace(state["operations"], same_step=same_step)

    # -- collectives outside steps

    def allreduce(self, tensor: torch.Tensor, op: ReduceOp) -> torch.Tensor:
        """See bagua_core.allreduce."""
        if self.communicator() is None:
            return tensor.clone()
        if self._step_begun:
            return self._allreduce_in_step(tensor, op)
        if self.global_rank in self._newcomers:
            return tensor.clone()  # it takes part from its first step on
        return self._operate(tensor, op)

    def _allreduce_in_step(self, tensor: torch.Tensor, op: ReduceOp) -> torch.Tensor:
        """Part of the step: it fails with it. Once the step's reduction is in, the step is final, so a failure
        then only ends the generation, and the rank's own value comes back."""
        communicator, member = self.communicator(), self._member
        assert communicator is not None and member is not None
        if self._failed is not None or member.broken:
            return tensor.clone()
        healing = self.global_rank in self._plan.healing
        result = operations.neutral(tensor, op) if healing else tensor.clone()
        try:
            self.wait(communicator.allreduce(result, ReduceOp.SUM if op is ReduceOp.AVG else op))
        except CollectiveFailed as error:
            if self._reduced:
                member.break_generation(error)
            else:
                self.reduction_failed(error)
            return tensor.clone()
        return result.div_(self._plan.active_count) if op is ReduceOp.AVG else result

    def _operate(self, tensor: torch.Tensor, op: ReduceOp, finishing: bool = False) -> torch.Tensor:
        """Run one collective of the log until it succeeded among the members that are left."""
        member, log = self._member, self.operations
        assert member is not None
        index = log.next_index
        log.is_running = True
        try:
            while True:
                recorded = log.recorded(index)
                if recorded is not None:
                    log.returned()
                    return recorded.clone()
                if member.generation is None or (finishing and member.is_closed):
                    log.returned()
                    return tensor.clone()
                try:
                    result = self._attempt(member, index, tensor, op)
                except CollectiveFailed as error:
                    if not member.broken:
                        member.break_generation(error)
                    member.follow(outside=True, given_up=lambda: finishing and member.is_closed)
                    continue
                # Newcomers did not take part, but without the state they cannot undo anything either.
                self._release(self._name.step + 1, frozenset())
                self._name = StateName(self.generation_number, self._name.step, index + 1)
                log.record(result)
                log.returned()
                self._say_entered()
                self.reach("outside.done")
                return result
        finally:
            log.is_running = False

    def _attempt(self, member: Member, index: int, tensor: torch.Tensor, op: ReduceOp) -> torch.Tensor:
        if member.broken:
            raise CollectiveAborted("the generation broke before")
        communicator = member.communicator
        assert communicator is not None
        members = tuple(r for r in range(communicator.world_size) if r not in self._newcomers)
        if len(members) == 1:
            return tensor.clone()
        if self._newcomers:
            communicator = member.side_communicator(members)
        operations.check_agreement(communicator, index, tensor, op, member.wait_unlearned)
        result = tensor.clone()
        member.wait_unlearned(communicator.allreduce(result, op))
        return result

    # -- the end

    def finish(self) -> bool:
        """Commit the step under way, then wait until every member has committed it too.

        False: meanwhile the job went elsewhere with this worker (it was left out and joined again): the
        source's position says where, and there is more to do.
        """
        if self._finished:
            return True
        if self._step_begun:
            self._end_step()
        member = self._member
        if member is not None and member.generation is not None:
            self._finish_transfer()
            steps = self._name.step
            if self.global_rank in self._newcomers:
                # It came for a step that the job did not need any more.
                member.wait_closed()
                self._finished = True
                return True
            # Twice: a rank that completes the first knows that everyone has the last step, and writes its line; one
            # that completes the second knows that everyone has written.
            for _ in range(2):
                self._operate(torch.zeros(1), ReduceOp.SUM, finishing=True)
            if not member.is_closed and (member.generation is None or self._name.step != steps):
                self.boundary()
                return False
            self.reach("finish.done")
            member.session.training_done(member.number, self._name.step)
        self._finished = True
        return True

    def _finish_transfer(self) -> None:
        """A copy that would have run beside the next step, were there one."""
        transfer = self._transfer
        if transfer is None:
            return
        self._transfer = None
        try:
            self._await(transfer)
        except CollectiveFailed as error:
            assert self._member is not None
            self._member.break_generation(error)
            return
        if self.global_rank in self._healing:
            self._swap_in(transfer.result)

    def shutdown(self, exit_code: int) -> bool:
        """See runtime.shutdown."""
        member = self._member
        if member is None:
            return False
        if exit_code == 0 and not self._finished and not self._ended and member.generation is not None:
            self.finish()
        self._report_progress()
        member.session.close()
        return True

    # -- ledger

    def _release(self, step: int, healing: frozenset[int]) -> None:
        """A collective of all members completed: lines that can't be undone any more are written."""
        self._history, due = self._history.collective_completed(step, healing, self._worker_id, self._roster)
        self._write(due)

    def _write(self, due: Iterable[Line]) -> None:
        if self._ledger is None or self._source is None:
            return
        for line in due:
            self.reach("ledger.before")
            step = line.entry
            position = dict(step.position)
            plan = StepPlan(step.generation, step.step - 1, 0, step.world_size, step.healing)
            self._ledger.write(
                LedgerLine(
                    time=step.time_s,
                    generation=step.generation,
                    step=step.step,
                    global_rank=line.global_rank,
                    world_size=step.world_size,
                    epoch=position["epoch"],
                    samples=self._source.samples_of(position, plan, line.global_rank),
                )
            )
