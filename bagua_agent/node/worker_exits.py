"""Handles the end of a worker: records how it ended, removes its keys, starts a successor.

The pure function `consequence` decides; `WorkerExits` acts. exit_cause.py interprets an exit, secondary_failure.py
decides whether another worker's end explains it, restart_policy.py whether failures end the job. For live mode.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from bagua_agent.base import backoff
from bagua_agent.base.errors import InfrastructureLost, UserError
from bagua_agent.history import job_history
from bagua_agent.job_state.context import JoinedJob
from bagua_agent.membership.failures.restart_policy import in_doubt, succession
from bagua_agent.membership.failures.root_cause import tells_of_another
from bagua_agent.membership.failures.secondary_failure import (
    NO_CO_WORKERS,
    CoWorkers,
    secondary_failure_cause,
)
from bagua_agent.membership.hang import HangOutcome
from bagua_agent.membership.policy import Policy
from bagua_agent.membership.view import FailureView
from bagua_agent.node.node_workers import NodeWorkers
from bagua_agent.node.worker_ends import NodeWorker
from bagua_agent.rpc.message_pace import BytesBudget, etcd_budget
from bagua_agent.workers.exits.exit_cause import ExitCause, shell_exit_code
from bagua_contract import membership_pb2 as pb

NEWEST = 1 << 62  # order of a failure that has no revision yet
LOOK_AGAIN_S = 0.1  # for what explains a failure; records are looked at as they come
END_BYTES = 4 << 10  # in etcd, of the keys that come and go with a worker, and of the event


@dataclass(frozen=True, slots=True)
class LastSeen:
    """The facts known of a worker at its end.

    generation, steps, joining: those of its last report. was_member: its member key exists. trained: it confirmed the
    last commit. co_workers: those in generations. listed: the newest generation that listed it, and its world size.
    last_checkpoint: its report when it left. left_alone: it was asked to leave though its node stays. left_out: the job
    went on without it, and it has not come back since.
    """

    was_member: bool
    trained: bool
    generation: int = 0
    steps: int = 0
    co_workers: CoWorkers = NO_CO_WORKERS
    listed: tuple[int, int] = (0, 0)
    last_checkpoint: pb.LastCheckpoint | None = None
    left_alone: bool = False
    joining: bool = False
    left_out: bool = False


class Record(Enum):
    NONE = "none"
    DEPARTED = "departed"
    FINISHED = "finished"
    FAILURE = "failure"


@dataclass(frozen=True, slots=True)
class Consequence:
    """The decision that follows from a worker's end. record: written before the keys are removed. at_once: the keys are
    removed without waiting for it. unexpected: the end counts for the node's exit code, and the slot may get a
    successor."""

    record: Record
    at_once: bool = False
    unexpected: bool = False


def consequence(
    returncode: int, script_failure: bool, last: LastSeen, *, leaving: bool, stopping: bool
) -> Consequence:
    """Decides what follows from a worker's end. stopping: ends of workers are expected, since the node leaves or the
    job has its result."""
    if returncode == 0:
        # one that left says nothing about the end of the job
        return Consequence(Record.DEPARTED if leaving and not last.trained else Record.FINISHED)
    if leaving:
        return Consequence(Record.DEPARTED)
    if stopping:
        return Consequence(Record.NONE)
    # A lost process: the others wait for nothing but the key. A script's failure is to be known before its absence.
    return Consequence(Record.FAILURE, at_once=last.was_member and not script_failure, unexpected=True)


@dataclass(slots=True)
class _Unexplained:
    """A failure that mentions another worker's end which is not reported yet, or that waits: its slot has no successor
    so far, since the job would end with it. written: set in the writes' thread once its record is written. at_s: when
    the worker ended, or the record was still not written."""

    failure: pb.Failure
    co_workers: CoWorkers
    at_s: float
    written: threading.Event
    waits: bool = False


class WorkerExits:
    """Acts on the ends of this node's workers in live mode. on_given_up(): a slot will have no more workers."""

    def __init__(
        self,
        job: JoinedJob,
        workers: NodeWorkers,
        policy: Policy,
        on_given_up: Callable[[], None],
    ) -> None:
        self._job = job
        self._policy = policy
        self._on_given_up = on_given_up
        self._workers = workers
        self._unexplained: dict[str, _Unexplained] = {}  # by worker
        self._written: defaultdict[int, BytesBudget] = defaultdict(etcd_budget)  # by slot
        self.exit_code = 0

    def take(self, worker_id: str, returncode: int, last: LastSeen, now_s: float) -> bool:
        """Handles the end of a worker, which must be known to `workers`, and tells whether it was unexpected. Called
        once per worker."""
        worker, cause = self._workers.ended(worker_id, returncode)
        returncode = cause.exit_code
        seen, keys, store = self._job.seen, self._job.keys, self._job.store
        # its script may have ended by a value that the other workers did not have: the training goes on
        left_out = returncode == 0 and last.left_out and not last.trained and not seen.closing
        leaving = seen.leaving_since_s is not None or last.left_alone or left_out
        failure = self._failure(worker, returncode, cause, last)
        happened = job_history.worker_ended(failure)  # of the exit itself, whatever explains it
        explained_by = self._casualty_of(failure, last.co_workers)
        if explained_by:
            failure.script_failure = False
        now = consequence(returncode, failure.script_failure, last, leaving=leaving, stopping=seen.stopping)
        if now.unexpected:
            self.exit_code = shell_exit_code(returncode)
        if now.at_once or now.record is Record.NONE:
            self._remove_keys(worker_id)
        if now.record is Record.FINISHED:
            finished = pb.Finished(
                worker_id=worker_id,
                step=last.steps,
                before_joining=not last.was_member,
                agent_id=self._job.agent_id,
                node_name=self._job.node_name,
            ).SerializeToString()
            self._record(worker_id, "finished", lambda: store.put(keys.finished(worker_id), finished))
        elif now.record is Record.DEPARTED:
            departed = self._departure(worker_id, last).SerializeToString()
            self._record(worker_id, "departed", lambda: store.put(keys.departed(worker_id), departed))
            if (last.left_alone or (left_out and seen.leaving_since_s is None)) and not seen.stopping:
                why = "has left" if last.left_alone else "ended with 0 after the job had gone on without it"
                self._job.terminal.tell(f"worker in slot {worker.slot} {why}; starting another")
                self._job.timers.set(
                    f"respawn {worker.slot}", now_s, lambda at_s: self.start_worker(worker.slot, at_s)
                )
        elif now.record is Record.FAILURE:
            written = threading.Event()
            self._put(failure, written)
            self._job.history.own(happened)
            waits = self._respawn(failure, now_s, explained_by)
            if waits or (failure.script_failure and tells_of_another(failure.cause, failure.traceback_tail)):
                self._unexplained[worker_id] = _Unexplained(failure, last.co_workers, now_s, written, waits)
                self._look_again_at(now_s + LOOK_AGAIN_S)
        return now.unexpected

    def _put(self, failure: pb.Failure, written: threading.Event) -> None:
        key, store = self._job.keys.failure(failure.worker_id), self._job.store

        def put() -> None:
            # what holds when it is written: a write that had to be tried again must not undo a later one
            store.put(key, failure.SerializeToString())
            written.set()

        self._record(failure.worker_id, "failure", put)

    def _record(self, worker_id: str, what: str, write: Callable[[], object]) -> None:
        def write_and_remove() -> None:
            write()
            self._remove_keys(worker_id)

        self._job.writes.until_done(f"{what} {worker_id}", write_and_remove)

    def _remove_keys(self, worker_id: str) -> None:
        for key in (self._job.keys.suspicion(worker_id), self._job.keys.member(worker_id)):
            self._job.leased.remove(key)

    def _failure(self, worker: NodeWorker, returncode: int, cause: ExitCause, last: LastSeen) -> pb.Failure:
        generation = self._job.seen.generation
        placement = generation.placement_of(worker.worker_id) if generation else None
        return pb.Failure(
            worker_id=worker.worker_id,
            agent_id=self._job.agent_id,
            node_name=self._job.node_name,
            slot=worker.slot,
            global_rank=placement.global_rank if placement else -1,
            exit_code=returncode,
            cause=cause.summary,
            log_path=worker.files.shown,
            step=last.steps,
            in_step=last.generation > 0,
            joining=last.joining,
            script_failure=cause.script_failure,
            traceback_tail=cause.traceback_tail,
            kills_in_a_row=worker.kills_in_a_row,
        )

    def _departure(self, worker_id: str, last: LastSeen) -> pb.Departure:
        generation, world_size = last.listed
        return pb.Departure(
            worker_id=worker_id,
            agent_id=self._job.agent_id,
            node_name=self._job.node_name,
            generation=generation,
            world_size=world_size,
            last=last.last_checkpoint,
        )

    # -- casualties

    def _casualty_of(self, failure: pb.Failure, co_workers: CoWorkers) -> str:
        """Returns the worker whose end explains the failure; empty if none is known so far."""
        if not failure.script_failure:
            return ""
        seen = self._job.seen
        known = seen.view.failures.get(failure.worker_id)
        own = FailureView.of(failure, NEWEST if known is None else known.order)
        return secondary_failure_cause(own, co_workers, seen.view, whole=seen.whole)

    def records_came(self) -> None:
        """Notes that there is a newer record: explanations are looked for once the picture has it."""
        if self._unexplained:
            self._look_again_at(float("-inf"))

    def _look_again_at(self, at_s: float) -> None:
        self._job.timers.set("casualties", at_s, self._look_again)

    def _look_again(self, now_s: float) -> None:
        """Looks again for explanations: a peer's end is often known only after the failure that it explains."""
        if self._job.seen.stopping or self._job.seen.closing:
            self._unexplained.clear()
            return
        for worker_id, one in list(self._unexplained.items()):
            explained_by = self._casualty_of(one.failure, one.co_workers)
            if explained_by:
                one.failure.script_failure = False
                self._put(one.failure, one.written)
                where = f"worker in slot {one.failure.slot}"
                self._job.terminal.tell(
                    f"{where} was {_casualty(explained_by)}: it does not count as a script failure"
                )
            if not self._is_known(one):
                one.at_s = now_s  # without etcd its record is not written yet, and other ends are not known
            in_time = now_s < one.at_s + self._policy.cause_window_s
            one.waits = one.waits and self._respawn(
                one.failure, now_s, explained_by, again=True, job_goes_on=not in_time
            )
            if not one.waits and (explained_by or not in_time):
                del self._unexplained[worker_id]
        if self._unexplained:
            self._look_again_at(now_s + LOOK_AGAIN_S)

    def _is_known(self, one: _Unexplained) -> bool:
        """Tells whether the leader has the record of the failure. In a large job this agent does not see records of
        ends."""
        seen = self._job.seen
        return one.failure.worker_id in seen.view.failures or (not seen.whole and one.written.is_set())

    # -- successors

    def _respawn(
        self,
        failure: pb.Failure,
        now_s: float,
        explained_by: str,
        *,
        again: bool = False,
        job_goes_on: bool = False,
    ) -> bool:
        """Decides on the slot's successor, and tells whether this has to be decided again. It has to if the job ends
        with this failure unless another worker's end explains it or another failure, or unless the job has trained,
        which an agent of a large job may not know.

        again: it was reported already. job_goes_on: the leader knows of it and has had time to end the job.
        """
        seen, tell, slot = self._job.seen, self._job.terminal.tell, failure.slot
        where = f"worker in slot {slot}"
        known = [f for f in seen.view.failures.values() if f.worker_id != failure.worker_id]
        new = FailureView.of(failure, NEWEST)
        allowed = seen.failures_allowed
        trained = seen.has_trained or (job_goes_on and not seen.whole)
        early = self._workers.early_crashes(slot)
        next_one = succession(known, new, early, allowed, self._policy, trained=trained)
        if_trained = succession(known, new, early, allowed, self._policy, trained=True)
        # Where ranks disagree the job fails with that, whatever the budget allows.
        disagree = seen.view.hang_order is not None and seen.view.hang_order.outcome is HangOutcome.DISAGREE
        if seen.closing or disagree or next_one.fails_job:
            if not again:
                tell(f"{where} failed: {failure.cause}")
            # the leader writes the result, unless it comes to doubt it
            at_any_time_s = float("-inf")
            doubt = in_doubt([*known, new], allowed, trained=trained, since_s=at_any_time_s)
            unsure = not seen.whole and not if_trained.fails_job
            return (bool(doubt) or unsure) and not seen.closing and not disagree
        delay_s = next_one.delay_s
        if delay_s is None:
            tell(f"{where} is given up: {next_one.reason}")
            self._on_given_up()
            return False
        # Ends that count on no budget of failures, as of workers that kill themselves after a step, are written too.
        delay_s = max(delay_s, self._written[slot].take(END_BYTES + failure.ByteSize(), now_s))
        later = f" in {delay_s:g} s" if delay_s else ""
        what = "" if again else f" ended: {failure.cause}"
        if explained_by and not again:
            what += f"; {_casualty(explained_by)}"
        tell(f"{where}{what}; starting another{later}" if what else f"{where}: starting another{later}")

        self._job.timers.set(f"respawn {slot}", now_s + delay_s, lambda at_s: self.start_worker(slot, at_s))
        return False

    def start_worker(self, slot: int, now_s: float, failed: int = 0) -> None:
        """Starts the slot's worker, unless none is needed any more. One that can't be started is tried again later: the
        workers of other slots go on meanwhile.

        failed: attempts in a row before. Raises UserError if this node has no worker that could go on.
        """
        if self._job.seen.stopping or self._job.seen.closing:
            return
        try:
            self._workers.spawn(slot)
        except (UserError, InfrastructureLost) as error:
            if isinstance(error, UserError) and not self._workers.worker_ids:
                raise
            policy = self._policy
            delay_s = backoff.delay_s(
                failed + 1, policy.respawn_first_delay_s, policy.respawn_longest_delay_s
            )
            self._job.terminal.tell(
                f"no worker could be started in slot {slot}: {error}; trying again in {delay_s:g} s"
            )
            self._job.timers.set(
                f"respawn {slot}",
                now_s + delay_s,
                lambda at_s: self.start_worker(slot, at_s, failed + 1),
            )


def _casualty(of: str) -> str:
    return f"a casualty of {of}"
