"""The end of a round: averages the members' models, and keeps the local steps where that fails.

To the engine a round is a step: it begins at a boundary, ends with a vote, and commits on all members or on none of
those that survive. Two things differ. Its optimizer steps are local, so that no collective runs between its begin and
its end. And a failed average undoes nothing: the survivors meet in the next generation and repeat it with what they
trained, before any of them leases further samples (`is_round_open`). States, invariants and failure cases:
docs/design/rounds.md.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace

import torch

from bagua_contract.environment import WorkerEnvironment
from bagua_contract.records import Generation
from bagua_core.communication.communicator import CollectiveFailed, Communicator
from bagua_core.communication.step_interface import Rounds, Used
from bagua_core.elastic.replica.own_replica import Outcome
from bagua_core.elastic.step.early_end import EarlyEnd
from bagua_core.elastic.step.round_rows import ROW_COLUMNS, from_row, to_row
from bagua_core.elastic.step.step_end import StepEnd
from bagua_core.elastic.step.step_states import Event
from bagua_core.elastic.waiting.operation_trail import STEP
from bagua_core.errors import UserError


class RoundsNeedLoader(UserError, RuntimeError):
    """The loop has no ElasticDataLoader, but the algorithm's unit of commit is the round."""


class UnequalRounds(UserError, ValueError):
    """The models of a job have rounds of different lengths, or only some of them have rounds."""


class RoundEnd(StepEnd):
    """Adds the end of a round to StepEnd."""

    def __init__(self, environment: WorkerEnvironment | None) -> None:
        super().__init__(environment)
        self.is_round_open = False  # a member of the generation holds local steps that no average contains
        self._confirms = False  # the boundary under way is to be confirmed by all members
        self._used: Sequence[Used] = ()  # by the members in the round under way, by global rank
        self._early_end = EarlyEnd(self._say)
        self._end_from_s = 0.0  # when this worker was done with the local steps of the round under way
        self._kept_s = 0.0  # what local steps took whose average is to be repeated

    @property
    def round_steps(self) -> int | None:
        """The number of local steps of a round; None if the models have no rounds. Raises UnequalRounds."""
        found = {model.round_steps for model in self.inputs.models}
        if len(found) > 1:
            raise UnequalRounds(
                f"the job's models have rounds of {sorted(found, key=str)} steps (None: no rounds), but a round is "
                "committed for all of them; give all the same algorithm and sync_every"
            )
        return found.pop() if found else None

    def closes_round_early(self) -> bool:
        """Tells whether the round is to end now: another member has used up its lease, or a newer generation leaves out
        a member of the one in force. The shards of a replica take the same local steps, so one that hears of it first
        tells the others. See StepEngine."""
        member = self.member
        if member is None:
            return False
        return member.agree(Outcome.MOVES if self._is_to_close() else Outcome.DONE) is not Outcome.DONE

    def _is_to_close(self) -> bool:
        member = self.member
        if member is None or member.generation is None:
            return False
        news, in_force = member.session.news, member.generation
        newest = news.generation
        if news.leave:
            return True
        if newest is not None and newest.number > in_force.number and _leaves_out(newest, in_force):
            return True
        shared = self._ends_early_in()
        return shared is not None and self._early_end.is_due(shared, self.plan.step)

    def _ends_early_in(self) -> Generation | None:
        """Returns the generation in force, if its first member that has used up its lease ends the round under way."""
        in_force = None if self.member is None else self.member.generation
        if in_force is None or self.rounds is None or not self.rounds.may_end_early:
            return None
        return in_force if in_force.world_size > 1 else None

    def _end_step(self) -> None:
        self._end_from_s = time.monotonic()
        super()._end_step()

    def _step_begins_s(self, now_s: float) -> float:
        """Returns the begin of the step that starts at now_s. A repeated round begins earlier by the time of its local
        steps, so that the time between the two tries does not count."""
        return now_s - (self._kept_s if self.rounds is not None and self.rounds.has_work else 0.0)

    @contextmanager
    def at_round_begin(self) -> Iterator[None]:
        """Gives the models, within this context, the parameters with which the round under way began. Parameters and
        buffers in a checkpoint, or in a copy for another worker, then have no local step of a round whose samples its
        book calls unused. The inner optimizers' state has these steps: each worker keeps its own."""
        guard = self.state.guard  # no other thread reads the state in the middle of these changes
        with ExitStack() as models:
            with guard.held():
                for model in self.inputs.models if self.rounds is not None and self.rounds.has_work else ():
                    models.enter_context(model.at_round_begin())
            try:
                yield
            finally:
                with guard.held():
                    models.close()

    def _close_round(self) -> None:
        rounds = self.rounds
        if rounds is None:
            return
        communicator = self.communicator()
        if communicator is not None and communicator.world_size == 1:
            communicator = None
        shared = self._ends_early_in()
        if shared is not None and rounds.is_used_up:
            self._early_end.end(shared, self.plan.step)
        own = self._used_here(rounds)
        try:
            used = self._used = [own] if communicator is None else self._exchanged(communicator, own)
            self._confirms = any(one.confirms for one in used)
            samples = sum(one.count for one in used)
            if samples:
                with self.state.guard.held():
                    # a last checkpoint would give the models other parameters, whose distance the members commit
                    self.state.guard.provisional = True
                source = next(rank for rank, one in enumerate(used) if one.count)
                for model in self.inputs.models:
                    model.close_round(communicator, own.count / samples, source)
        except CollectiveFailed as error:
            self.reduction_failed(error)

    def _used_here(self, rounds: Rounds) -> Used:
        """Returns what this worker used in the round. With replicas it is what shard 0 has measured: leases follow from
        speeds, and all shards draw the same."""
        own = replace(rounds.used(), confirms=self._confirms)
        if self.member is None or self.member.replica is None:
            return own
        row = self.member.of_first_shard(torch.tensor(to_row(own), dtype=torch.int64, device="cpu"))
        return from_row(row.tolist())

    def _exchanged(self, communicator: Communicator, own: Used) -> list[Used]:
        """Returns what each member used, by global rank. Raises CollectiveFailed, PeerViolation."""
        row = torch.tensor(to_row(own), dtype=torch.int64, device="cpu")
        rows = torch.zeros((communicator.world_size, ROW_COLUMNS), dtype=torch.int64, device="cpu")
        self._wait_in(communicator.allgather(rows, row), STEP)
        return [from_row(each) for each in rows.tolist()]

    def _round_committed(self) -> None:
        if self.rounds is not None:
            self.rounds.closed(self.plan, self._used)
            self.rounds.keep_only(dict(kept.entry.position) for kept in self.state.history.kept)
            self.is_round_open = False
            self._kept_s = 0.0

    def _roll_back(self) -> None:
        """Rolls back the step. Of a round only the average is given up: what this worker trained stays, and the average
        is repeated."""
        if self.rounds is None:
            super()._roll_back()
            return
        why, self._failure = self._failure, None
        state = self.state
        with state.guard.held():
            state.guard.stepping = state.guard.provisional = False
            # without work of its own this worker begins the round anew, and has what the script does until then
            state.resume_point_is_current = state.resume_point_is_current and self.rounds.has_work
            for model in self.inputs.models:
                model.step_rolled_back()
            self.newcomers = frozenset()
            self._drop_copy()
            self.states.take(Event.ROLL_BACK)
        kept = self.rounds.has_work
        self._kept_s = self._end_from_s - self._step_from_s if kept else 0.0
        apart = ""
        if self._reports is not None:
            apart = self._reports.step_failed(steps_until_s=self._end_from_s if kept else None)
        self._say(
            f"round {state.name.step} in generation {self.plan.generation} was not averaged: {why}; its local steps "
            f"are kept, and the average is repeated{'; ' + apart if apart else ''}"
        )


def _leaves_out(newer: Generation, older: Generation) -> bool:
    """Tells whether a member of `older` is not in `newer`."""
    return any(newer.placement_of(member.worker_id) is None for member in older.members)
