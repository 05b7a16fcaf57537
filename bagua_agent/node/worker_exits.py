"""What does the end of a worker call for? A record of how it ended, the removal of its keys, a successor.

`consequence` decides, purely; `WorkerExits` acts. What an exit means is exit_cause.py, whether failures end the job
restart_policy.py. The same for every way of running workers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from bagua_agent.history import job_history
from bagua_agent.joined_job import JoinedJob
from bagua_agent.membership.policy import Policy
from bagua_agent.membership.restart_policy import succession
from bagua_agent.membership.view import FailureView
from bagua_agent.node.node_workers import NodeWorker, NodeWorkers
from bagua_agent.workers.exit_cause import ExitCause, shell_exit_code
from bagua_contract import membership_pb2 as pb

NEWEST = 1 << 62  # order of a failure that has no revision yet


@dataclass(frozen=True, slots=True)
class LastSeen:
    """What is known of a worker at its end. generation, steps: of its last report. was_member: its member key stands.
    trained: it confirmed the last commit."""

    was_member: bool
    trained: bool
    generation: int = 0
    steps: int = 0


class Record(Enum):
    NONE = "none"
    FINISHED = "finished"
    FAILURE = "failure"


@dataclass(frozen=True, slots=True)
class Consequence:
    """record: to be written before the keys go. at_once: the keys go without waiting for it. unexpected: it counts
    for the node's exit code, and the slot may get a successor."""

    record: Record
    at_once: bool = False
    unexpected: bool = False


def consequence(
    returncode: int, script_failure: bool, last: LastSeen, *, leaving: bool, stopping: bool
) -> Consequence:
    """stopping: ends of workers are expected, since the node leaves or the job has its result."""
    if returncode == 0:
        # one that left says nothing about the end of the job
        return Consequence(Record.NONE if leaving and not last.trained else Record.FINISHED)
    if stopping:
        return Consequence(Record.NONE)
    # A lost process: the others wait for nothing but the key. A script's failure is to be known before its absence.
    return Consequence(Record.FAILURE, at_once=last.was_member and not script_failure, unexpected=True)


class WorkerExits:
    """on_given_up(): a slot will have no more workers."""

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
        self.exit_code = 0

    def take(self, worker_id: str, returncode: int, last: LastSeen, now_s: float) -> None:
        """Once per worker, which must be known to `workers`."""
        worker, cause = self._workers.ended(worker_id, returncode)
        seen, keys, store = self._job.seen, self._job.keys, self._job.store
        leaving = seen.leaving_since_s is not None
        now = consequence(returncode, cause.script_failure, last, leaving=leaving, stopping=seen.stopping)
        if now.unexpected:
            self.exit_code = shell_exit_code(returncode)
        if now.at_once or now.record is Record.NONE:
            self._remove_keys(worker_id)
        if now.record is Record.FINISHED:
            self._record(worker_id, "finished", lambda: store.put(keys.finished(worker_id), b"\x01"))
        elif now.record is Record.FAILURE:
            failure = self._failure(worker, returncode, cause, last)
            value = failure.SerializeToString()
            self._record(worker_id, "failure", lambda: store.put(keys.failure(worker_id), value))
            self._job.history.own(job_history.worker_ended(failure))
            self._respawn(worker.slot, failure, now_s)

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
            log_path=str(worker.files.directory),
            step=last.steps,
            in_step=last.generation > 0,
            script_failure=cause.script_failure,
            traceback_tail=cause.traceback_tail,
        )

    def _respawn(self, slot: int, failure: pb.Failure, now_s: float) -> None:
        seen, tell = self._job.seen, self._job.narrator.tell
        where = f"worker in slot {slot}"
        known = [f for f in seen.view.failures.values() if f.worker_id != failure.worker_id]
        new = FailureView(
            worker_id=failure.worker_id,
            node_name=failure.node_name,
            step=failure.step,
            in_step=failure.in_step,
            script_failure=failure.script_failure,
            summary=failure.cause,
            order=NEWEST,
            was_member=failure.in_step or failure.global_rank >= 0,
        )
        next_one = succession(
            known,
            new,
            self._workers.early_crashes(slot),
            seen.failures_allowed,
            self._policy,
            trained=seen.view.has_trained,
        )
        if seen.closing or next_one.fails_job:
            tell(f"{where} failed: {failure.cause}")
            return  # the leader writes the result
        delay_s = next_one.delay_s
        if delay_s is None:
            tell(f"{where} is given up: {next_one.reason}")
            self._on_given_up()
            return
        later = f" in {delay_s:g} s" if delay_s else ""
        tell(f"{where} ended: {failure.cause}; starting another{later}")

        def spawn(_: float) -> None:
            if not seen.stopping and not seen.closing:
                self._workers.spawn(slot)

        self._job.timers.set(f"respawn {slot}", now_s + delay_s, spawn)
