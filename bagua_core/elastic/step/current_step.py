"""The step under way, and its reductions: what the reducer and the optimizers see of a step.

Implements step_interface.StepReductions. Where a step begins, is committed and rolled back is engine.py's. Everything
runs in the script's thread, or in autograd's during a backward.
"""

from __future__ import annotations

import sys

import torch

from bagua_contract.environment import WorkerEnvironment
from bagua_core import tracing
from bagua_core.communication.communicator import CollectiveFailed, Communicator, Pending
from bagua_core.communication.reduction import reported_loss
from bagua_core.communication.reduction.reported_loss import JobLoss
from bagua_core.communication.step_interface import MicroBatch, Rounds, StepPlan
from bagua_core.elastic.failpoints import Failpoints
from bagua_core.elastic.ledger.ledger import LedgerWriter
from bagua_core.elastic.ledger.ledger_lines import LedgerLines
from bagua_core.elastic.membership import entry
from bagua_core.elastic.membership.member import Member
from bagua_core.elastic.replica.own_replica import Outcome
from bagua_core.elastic.state.committed_state import CommittedState
from bagua_core.elastic.step.copying import Copying
from bagua_core.elastic.step.deterministic_worker import refuse_replicas, use_deterministic_kernels
from bagua_core.elastic.step.step_states import IN_STEP, Event, Phase, StepStates
from bagua_core.elastic.waiting.operation_trail import BOUNDARY, FORWARD, STEP
from bagua_core.errors import UserError


class OutsideStepError(UserError, RuntimeError):
    """Gradients were computed where no step is under way."""


class CurrentStep:
    """The step under way on this worker, and its reductions. environment None: a world of one, not launched."""

    def __init__(self, environment: WorkerEnvironment | None) -> None:
        self.state = CommittedState()
        self.registry = self.state.registry
        self.member: Member | None = None
        self.copying: Copying | None = None

        self.states = StepStates()
        self.plan = StepPlan(0, 0, 0, 1)
        self._micro_batch = MicroBatch(1.0, True)
        self.rounds: Rounds | None = None  # where the round is the unit of commit, and steps in it are local
        self._failure: Exception | None = None  # why the step failed
        self.part = 0  # optimizer steps of this step so far
        self._lets_change = False  # copies of this step's state are made, or need not be
        self.in_forward = False  # of a model, whose waits are not the step's reductions
        self.most_parts = 0  # in any step that was committed here
        self.metrics: dict[str, float] = {}  # that the script reports: the newest value of each name
        self.job_loss: JobLoss | None = None  # by the newest reduction; None in a world of one
        # ranks that joined with this generation, until its first commit: they copy the state beside the first step,
        # and take part in nothing before it
        self.newcomers: frozenset[int] = frozenset()
        self.joining = False  # this worker is one of them, or was when it last took part
        self._roster: dict[str, int] = {}

        self.virtual_shards = environment.virtual_shards if environment else 0
        if environment is not None and self.virtual_shards:
            refuse_replicas(self.virtual_shards, environment.replica_size)
            use_deterministic_kernels()
        self.worker_id = environment.worker_id if environment else ""
        self._failpoints = Failpoints()
        writer: LedgerWriter | None = None
        if environment is not None:
            self._failpoints = Failpoints(environment.failpoints, environment.slot)
            if environment.ledger_dir:
                writer = LedgerWriter(environment.ledger_dir, environment.worker_id, self._say)
        self._lines = LedgerLines(writer, self.reach)

    @property
    def launched(self) -> bool:
        return self.member is not None

    @property
    def generation_number(self) -> int:
        return self.member.number if self.member else 0

    @property
    def global_rank(self) -> int:
        communicator = self.communicator()
        return communicator.global_rank if communicator else 0

    @property
    def world_size(self) -> int:
        communicator = self.communicator()
        return communicator.world_size if communicator else 1

    @property
    def step_failed(self) -> bool:
        return self.states.phase is Phase.FAILED

    @property
    def in_step(self) -> bool:
        return self.states.phase in IN_STEP

    @property
    def has_fillers(self) -> bool:
        """Whether a step is under way in which this worker's micro-batch has fillers in place of samples."""
        return self.in_step and 0.0 in (self._micro_batch.weight, self._micro_batch.part)

    @property
    def is_final(self) -> bool:
        """Whether the latest reduction of this step is in. Unless something of the step fails later, it is
        committed."""
        return self.states.phase is Phase.FINAL

    @property
    def micro_batch(self) -> MicroBatch:
        if self.states.phase in IN_STEP or not self.launched:
            return self._micro_batch
        if self.states.phase is Phase.ANNOUNCED:
            raise OutsideStepError(
                "the step that bagua.next_step() announced begins with a model's first forward in training, and "
                "there was none yet; call optimizer.step() after it, or draw batches from bagua.ElasticDataLoader"
            )
        raise OutsideStepError(
            "gradients were computed outside a step, or an optimizer used some there; draw batches from "
            "bagua.ElasticDataLoader, or call bagua.next_step() at the top of the loop, and take the last update of an "
            "epoch in its last step (loader.is_at_last_batch)"
        )

    def communicator(self) -> Communicator | None:
        """Returns the communicator that reduces steps; None without one. In a job with replicas it connects the workers
        with this shard, by replica rank."""
        return self.member.lane if self.member else None

    @property
    def replica_size(self) -> int:
        """The number of workers of a replica."""
        replica = self.member.replica if self.member else None
        return 1 if replica is None else replica.size

    @property
    def _is_newcomer(self) -> bool:
        return bool(self.newcomers) and self.global_rank in self.newcomers

    def reach(self, point: str) -> None:
        if self._failpoints.are_set:
            self._failpoints.reach(point, self.state.name.step)

    def _say(self, text: str) -> None:
        print(f"bagua: {text}", file=sys.stderr, flush=True)

    @property
    def _is_gathered(self) -> bool:
        """Whether the generation in force is a gathering, which has no state."""
        member = self.member
        return member is not None and member.generation is not None and member.generation.is_gathering

    def info(self) -> entry.Info:
        state = self.state
        stages = self.copying is None or self.copying.stages()
        return entry.Info(
            state.name,
            state.operations.is_running,
            state.position,
            stages,
            state.remains,
            self.registry.equal_states,
            0 if state.name.is_none or not self.registry.equal_states else state.layout(),
            self.joining and not state.name.is_none,
            state.final_parts + state.final_exchanges,
            self.rounds is not None and self.rounds.has_work,
            state.run,
        )

    def _drop_copy(self) -> None:
        if self.copying is not None:
            self.copying.drop()

    # -- for the reducer

    def switch_value(self) -> float:
        self.reach("reduction.before")  # read once, when the step's last reduction is about to start
        return self.member.switch_value() if self.member else 0.0

    def loss_numbers(self) -> tuple[float, float]:
        """Returns what this rank adds to the sums of reported_loss.py. What a joiner computed beside the copy, with
        parameters of its own, does not count. See StepReductions."""
        if self.plan.global_rank in self.plan.healing:
            return reported_loss.NOT_REPORTED
        return reported_loss.contribution(self.metrics)

    def losses_reduced(self, sums: tuple[float, float]) -> None:
        """Sets the job's loss from the sums of all ranks' loss_numbers. See StepReductions."""
        self.job_loss = reported_loss.job_loss(sums)

    def wait(self, pending: Pending) -> None:
        if self.part and self.is_final and not self.state.guard.stepping:
            self.registry.boundary.goes_on()
        self._wait_in(pending, FORWARD if self.in_forward else STEP)

    def _wait_in(self, pending: Pending, what: str) -> None:
        if self.member is not None:
            self.member.wait(pending, what)
        else:
            pending.wait()

    def _reduce_pair_alone(self) -> None:
        """Reduces the switch pair alone, so that a step that reduced no gradients commits all the same."""
        if self.member is None or self.member.communicator is None:
            self._reduced(None)
            return
        pair = self._vote(BOUNDARY)
        if pair is not None:
            self._reduced(pair)

    def _vote(self, what: str) -> tuple[float, float] | None:
        """Returns the sums of the switch pair over all workers, every one of which has come here; None if the step
        failed."""
        assert self.member is not None and self.member.communicator is not None
        v = self.switch_value()
        mine = torch.tensor([v, v * v, *self.loss_numbers()], dtype=torch.float32, device="cpu")
        votes = mine.new_empty(self.member.communicator.world_size, len(mine))
        try:
            # Gloo would match it with a bucket of a worker whose script did compute gradients here, if that travels by
            # the same collective: by allreduce, or in a deterministic job by allgather or alltoall.
            if self.virtual_shards:
                self._wait_in(self.member.communicator.allreduce(mine), what)
            else:
                self._wait_in(self.member.communicator.allgather(votes, mine), what)
        except CollectiveFailed as error:
            self.reduction_failed(error)
            return None
        total, squares, losses, reporting = (mine if self.virtual_shards else votes.sum(0)).tolist()
        self.losses_reduced((losses, reporting))
        return total, squares

    def reduction_done(self, pair: tuple[float, float] | None) -> None:
        """Ends a reduction whose buckets are all in. With replicas, what is reduced is this worker's shard: the step is
        final once all workers have come here, and all shards of the replica know it. See StepReductions."""
        if self.replica_size > 1:
            self._reduced(self._vote(STEP), is_joint=True)
        else:
            self._reduced(pair)

    def reduction_given_up(self) -> None:
        """Tells the other shards of the replica that a reduction of a failed step was not done. See StepReductions."""
        if self.member is not None:
            self.member.agree(Outcome.FAILED)

    def _is_done_on_all_shards(self) -> bool:
        """Tells whether the reduction succeeded on all shards of the replica. If not, the step has failed."""
        assert self.member is not None
        if self.member.agree(Outcome.FAILED if self.step_failed else Outcome.DONE) is not Outcome.FAILED:
            return True
        if not self.step_failed:
            self.reduction_failed(CollectiveFailed("another shard of this replica lost the step"))
        return False

    def _reduced(self, pair: tuple[float, float] | None, is_joint: bool = False) -> None:
        """Ends a reduction: makes the step final, and lets parameters change after the first one. is_joint: the shards
        of the replica agree here, whatever has failed."""
        self.reach("reduction.done")
        swaps_in = self._swaps_in()
        if not self._is_done_on_all_shards() if is_joint else self.step_failed:
            return
        is_first = not self._lets_change
        with self.state.guard.held():
            if is_first and not swaps_in:
                self._state_is_read(with_gradients=False)
            if self.in_step:  # under plain `python` a script may train without steps
                self.states.take(Event.REDUCE)
        if is_first:
            self._let_change()
        elif not self.state.guard.stepping and self.registry.boundary.is_moved():
            self.registry.boundary.goes_on()
        if pair is not None and self.member is not None:
            self.member.pair_reduced(pair)
        elif pair is None:
            self.job_loss = None  # no other worker has part in this step
        self._release(self.state.name.step + 1, self.newcomers)

    def _swaps_in(self) -> bool:
        """Swaps in the copy that the others have sent, and tells whether this worker was to receive one here. If that
        fails, so does the step."""
        copying = self.copying
        if copying is None or not self._is_newcomer or not copying.is_under_way:
            return False
        if not self.step_failed:
            try:
                copying.swap_in()
            except CollectiveFailed as error:
                self.reduction_failed(error)
        return True

    def _state_is_read(self, *, with_gradients: bool) -> None:
        """Finds what the script changed in the step so far, and gives it to workers that copy the state. Called under
        the guard."""
        self.registry.find_changed()
        if self.copying is not None:
            self.copying.reduced(with_gradients=with_gradients)

    def _let_change(self) -> None:
        """Lets the script and its optimizers change parameters from here on."""
        self._lets_change = True
        self._end_reading()
        with self.state.guard.held():
            self.registry.first_reduced()

    def _optimizer_comes_first(self) -> None:
        """Does what else the first reduction of the step does, since an optimizer steps before any, with gradients that
        the script has kept. Workers that copy the state need these gradients too."""
        if not self._swaps_in():
            with self.state.guard.held():
                self._state_is_read(with_gradients=True)
        if not self.step_failed:
            self.registry.backward_begins()  # a script clears them behind the optimizer's step
            self._let_change()

    def reduction_failed(self, error: Exception) -> None:
        self._fail(error)
        if self.member is not None:
            self.member.break_generation(error)

    def _fail(self, error: Exception) -> None:
        with self.state.guard.held():
            if not self.step_failed:
                self._failure = error
                if self.rounds is None:
                    self.registry.protect()
            self.states.take(Event.FAIL, str(error)[:80])

    # -- for the optimizers

    def backward_begins(self) -> None:
        """Notes that a backward is about to add to .grad. See StepEngine."""
        self.in_forward = False
        if self.in_step and self.launched:
            self.registry.gradients_begin()
            self.registry.backward_begins(is_filler=self._micro_batch.weight == 0.0)
            if (recorder := tracing.active) is not None:
                recorder.backward_begins()

    def takes_optimizer_step(self, final: bool = True) -> bool:
        """Tells whether the optimizer's step is to be done here and now. Several optimizer steps in one step are parts
        of it. With a copy of the boundary they are undone if the step fails later. Without one each is final once its
        own reduction succeeded: when the step is done again, it is not. final False: the part has further reductions.
        In a round each is a local step, which nothing undoes. Outside steps, which a script without a launcher need not
        mark, an optimizer steps as it would without Bagua."""
        if not self.in_step:
            return True
        self.part += 1
        if self.rounds is not None:
            if self.copying is not None and not self._is_newcomer:
                self.copying.reduced()  # a joiner gets the state as it is before the first local step
            self._end_reading()
            with self.state.guard.held():
                self.state.guard.stepping = True
            return True
        if self.part <= self.state.final_parts:
            return False
        # the shards of a replica copy a state together, at a reduction
        if self.states.phase is Phase.RUNNING and not self._lets_change and self.replica_size == 1:
            self._optimizer_comes_first()
            if self.step_failed:
                return False
        self._end_reading()
        with self.state.guard.held():
            self.state.guard.stepping = True
            if final:
                self.optimizer_step_is_final()
        return True

    def optimizer_step_is_final(self) -> None:
        """Commits the part of the step that an optimizer has done, if nothing would undo it. See StepEngine."""
        if self.rounds is None and not self.registry.boundary.is_kept:
            self.state.part_committed(self.generation_number, self.part)

    def optimizer_stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """Notes that an optimizer's step has returned. What a roll-back gives back must not undo a part of the step
        that is final. See StepEngine."""
        with self.state.guard.held():
            self.state.guard.stepping = False
            if self.rounds is not None:
                return
            if self.step_failed:
                self.registry.protect()  # it failed in the optimizer's step, which was undone: so are these values now
            else:
                self.registry.stepped(optimizer)

    def parameters_change(self) -> None:
        """Waits until copies of the state that are being sent no longer read the parameters, which then change
        provisionally. See StepReductions."""
        self._end_reading()
        with self.state.guard.held():
            self.state.guard.provisional = True

    def exchange_is_final(self) -> None:
        """Commits an exchange that has changed the job's state. A state without a name is no state of the job yet: all
        members get rank 0's. See StepReductions."""
        with self.state.guard.held():
            if self.in_step and not self.state.name.is_none:
                self.state.exchange_committed(self.generation_number)

    def _end_reading(self) -> None:
        """Waits until copies of the state that are being sent to others no longer read the parameters."""
        if self.copying is None or self._is_newcomer:
            return
        try:
            self.copying.sent()
        except CollectiveFailed as error:
            # This step's reduction is in, so the step is final here; only the generation is not.
            assert self.member is not None
            self.member.break_generation(error)

    def _release(self, step: int, healing: frozenset[int]) -> None:
        """Writes the ledger lines that can't be undone any more: a collective of all members completed."""
        state = self.state
        state.history, due = state.history.collective_completed(step, healing, self.worker_id, self._roster)
        self._lines.write(due)
