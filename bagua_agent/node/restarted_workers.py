"""Connects this node's workers with the job in restart mode, where workers start again for each generation.

One way of running workers (worker_lifecycle.py): unmodified scripts, which learn their ranks from the environment when
they start. States, in this order for each generation that lists this node:

    ending      workers of the one before get SIGTERM, after the shutdown timeout SIGKILL
    meeting     the agent of rank 0 opens a store for this generation alone and writes where; the others wait for that
    running     all workers of this node are started; each end is reported (ENDING, FINISHED, FAILED)

A newer record supersedes any of them. membership/state_machine/restarting.py decides the next generation. A worker that
opens a session is not of this kind: on_session is called. on_suspicion(now_s): a worker here failed, and no newer
record has come yet; the host that caused it may be the leader's.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable

from bagua_agent.base.errors import BaguaError, InfrastructureLost, UserError
from bagua_agent.base.plain_text import in_utf8
from bagua_agent.job_state.context import JoinedJob
from bagua_agent.membership.view import Run
from bagua_agent.node.node_workers import NodeWorkers, StartedFor
from bagua_agent.node.own_key import OwnKey
from bagua_agent.node.worker_lifecycle import LEADER_AGAIN_S
from bagua_agent.rpc.session_server import SessionServer
from bagua_agent.workers.exits.exit_cause import ExitCause, shell_exit_code
from bagua_agent.workers.start.worker_environment import TorchrunPlace
from bagua_contract import membership_pb2 as pb
from bagua_contract import session_pb2
from bagua_contract.addresses import parted
from bagua_contract.records import Generation, GenerationKind, Placement


class RestartedWorkers:
    def __init__(
        self,
        job: JoinedJob,
        workers: NodeWorkers,
        sessions: SessionServer,
        own_key: OwnKey,
        on_session: Callable[[], None],
        on_suspicion: Callable[[float], None],
        *,
        shutdown_timeout_s: float,
    ) -> None:
        self._job = job
        self._workers = workers
        self._sessions = sessions
        self._own_key = own_key
        self._on_session = on_session
        self._on_suspicion = on_suspicion
        self._shutdown_timeout_s = shutdown_timeout_s
        self._wanted: Generation | None = None
        self._meeting: tuple[int, str] = (0, "")  # generation and address of the newest that was announced
        self._running = 0  # the generation whose workers were started; 0: none
        self._ended_well: set[str] = set()
        self._failed = False
        self._exit_code = 0

    # -- what the job says

    def begin(self) -> None:
        self._workers.dismiss()  # this node had guessed otherwise than the one that wrote the job
        timers = self._job.timers
        self._workers.when_startable(
            lambda: timers.set_from_thread("ready", time.monotonic(), lambda _: self._own_key.ready())
        )

    def follow(self, generation: Generation) -> None:
        if generation.kind is not GenerationKind.RESTART:
            return
        self._wanted = generation
        self._running = 0
        if self._workers.worker_ids:
            self._end_running()
        else:
            self._meet()

    def follow_replicas(self, now_s: float) -> None:
        """Does nothing: a job with replicas is live."""

    def lost_touch(self, agent_id: str, now_s: float) -> None:
        """Does nothing: a job with replicas is live."""

    def met(self, generation: int, address: str) -> None:
        """Takes the address at which the workers of that generation meet, from the agent of rank 0."""
        self._meeting = (generation, address)
        if not self._workers.worker_ids:
            self._start()

    def close_joins(self) -> None:
        """Does nothing: only live jobs close."""

    def refuse(self, worker_id: str, difference: str) -> None:
        """Does nothing: only live jobs compare fingerprints."""

    def leave(self) -> str:
        """Does nothing: the leader sees the leave in this node's key and writes a generation without it."""
        return "as soon as the others go on without it"

    def interrupt(self) -> None:
        self._workers.signal_all(signal.SIGINT)

    # -- what the workers do

    def said(self, worker_id: str, message: session_pb2.WorkerMessage, now_s: float) -> None:
        if message.HasField("hello") and self._workers.get(worker_id) is not None:
            self._on_session()

    def exited(self, worker_id: str, returncode: int, now_s: float) -> None:
        if self._workers.get(worker_id) is None:
            return
        self._sessions.forget(worker_id)
        worker, cause = self._workers.ended(worker_id, returncode)
        returncode = cause.exit_code
        wanted = self._wanted
        if wanted is None or self._running != wanted.number or self._job.seen.stopping:
            # sent away for a newer generation, or because the job or this node's part is over
            if not self._workers.worker_ids:
                self._job.timers.cancel("kill workers")
                self._running = 0
                self._meet()
            return
        if returncode == 0:
            self._ended_well.add(worker_id)
            if not self._failed:
                self._record_finished(worker_id, wanted.number)
                every = len(self._ended_well) == len(self._placements(wanted))
                self._own_key.runs(wanted.number, Run.FINISHED if every else Run.ENDING)
            return
        if not self._failed:
            self._job.terminal.tell(f"worker in slot {worker.slot} ended: {cause.summary}")
        self._failed = True
        self._exit_code = shell_exit_code(returncode)
        placement = wanted.placement_of(worker_id)
        assert placement is not None
        self._report_failure(
            self._failure(placement, returncode, cause, worker.files.shown, worker.kills_in_a_row),
            wanted.number,
        )
        self._ask_for_the_leader(now_s)

    # -- what the node's end depends on

    def progress_of(self, worker_id: str) -> session_pb2.Progress | None:
        """Returns None: these scripts report nothing."""
        return None

    @property
    def awaits_generation(self) -> bool:
        wanted = self._wanted
        began = wanted is not None and self._running == wanted.number
        return self._failed and began and not self._job.seen.stopping

    @property
    def ready_workers(self) -> frozenset[str]:
        return frozenset(self._workers.worker_ids)

    @property
    def trained(self) -> bool:
        wanted = self._wanted
        return wanted is not None and 0 < len(self._ended_well) == len(self._placements(wanted))

    @property
    def exit_code(self) -> int:
        return self._exit_code

    # -- from one generation to the next

    def _placements(self, generation: Generation) -> list[Placement]:
        return [m for m in generation.members if m.agent_id == self._job.agent_id]

    def _end_running(self) -> None:
        """Sends SIGTERM to all workers here, or SIGINT if the node leaves because of one; workers that still run after
        the timeout are killed. A later generation sends no second signal and does not move the kill."""
        interrupted = self._job.seen.leaving_signal == signal.SIGINT
        self._workers.ask_all_to_end(signal.SIGINT if interrupted else signal.SIGTERM)
        self._job.timers.set_once(
            "kill workers",
            time.monotonic() + self._shutdown_timeout_s,
            lambda _: self._workers.signal_all(signal.SIGKILL),
        )

    def _meet(self) -> None:
        """Opens the meeting store if that is this node's part, else waits for its address. No worker runs here at this
        point."""
        wanted = self._wanted
        if wanted is None or self._job.seen.stopping or not self._placements(wanted):
            return
        if self._meeting[0] == wanted.number:
            self._start()
        elif wanted.members[0].agent_id == self._job.agent_id:
            self._open_meeting(wanted)

    def _open_meeting(self, wanted: Generation) -> None:
        opened: list[str] = []  # once, however often the write has to be tried

        def open_and_tell() -> None:
            if self._wanted is not wanted:
                return
            if not opened:
                try:
                    opened.append(self._workers.open_meeting())
                except BaguaError as error:
                    failure = self._failure(wanted.members[0], 1, _not_begun(error), "")
                    self._report_failure(failure, wanted.number)
                    return
            meeting = pb.Meeting(generation=wanted.number, address=opened[0])
            self._job.store.put(self._job.keys.meeting, meeting.SerializeToString())

        self._job.writes.until_done("meeting", open_and_tell)

    def _start(self) -> None:
        wanted, (number, address) = self._wanted, self._meeting
        if wanted is None or number != wanted.number or self._running or self._job.seen.stopping:
            return
        own = self._placements(wanted)
        if not own:
            return
        self._running = wanted.number
        self._ended_well.clear()
        self._failed = False
        host, port = parted(address)
        for placement in own:
            place = TorchrunPlace(
                local_rank=placement.local_rank,
                global_rank=placement.global_rank,
                node_rank=placement.node_rank,
                local_world_size=len(own),
                world_size=wanted.world_size,
                node_count=wanted.node_count,
                master_addr=host,
                master_port=port,
                run_id=self._job.keys.job_id,
                restart_count=wanted.restarts,
                max_restarts=self._job.seen.failures_allowed,
                use_agent_store=True,
            )
            try:
                self._workers.spawn(placement.slot, StartedFor(placement.worker_id, place))
            except (UserError, InfrastructureLost) as error:
                self._not_started(placement, error, wanted)
                return
        self._own_key.runs(wanted.number, Run.RUNNING)

    def _record_finished(self, worker_id: str, generation: int) -> None:
        """Records that a worker here has finished. This node's own key is removed with its lease, and whether the
        others may end without it is decided later."""
        job = self._job
        value = pb.Finished(
            worker_id=worker_id,
            agent_id=job.agent_id,
            node_name=job.node_name,
            generation=generation,
        ).SerializeToString()
        job.writes.until_done(
            f"finished {worker_id}", lambda: job.store.put(job.keys.finished(worker_id), value)
        )

    # -- failures

    def _ask_for_the_leader(self, now_s: float) -> None:
        if self.awaits_generation:
            self._on_suspicion(now_s)
            self._job.timers.set("leader asked for", now_s + LEADER_AGAIN_S, self._ask_for_the_leader)

    def _not_started(self, placement: Placement, error: BaguaError, wanted: Generation) -> None:
        """Reports a worker that could not be started. The generation lacks it, so another one is needed; this node's
        others end when it comes."""
        self._job.terminal.tell(f"no worker could be started in slot {placement.slot}: {error}")
        self._failed = True
        self._exit_code = error.exit_code
        self._report_failure(self._failure(placement, error.exit_code, _not_begun(error), ""), wanted.number)

    def _failure(
        self, placement: Placement, returncode: int, cause: ExitCause, log_path: str, kills_in_a_row: int = 0
    ) -> pb.Failure:
        return pb.Failure(
            worker_id=placement.worker_id,
            agent_id=self._job.agent_id,
            node_name=self._job.node_name,
            slot=placement.slot,
            global_rank=placement.global_rank,
            exit_code=returncode,
            cause=cause.summary,
            log_path=log_path,
            script_failure=cause.script_failure,
            traceback_tail=cause.traceback_tail,
            generation=self._wanted.number if self._wanted is not None else 0,
            kills_in_a_row=kills_in_a_row,
        )

    def _report_failure(self, failure: pb.Failure, generation: int) -> None:
        """Writes the record of the failure first, then the report that it exists: a reader of the report finds the
        record."""
        job = self._job

        def write() -> None:
            job.store.put(job.keys.failure(failure.worker_id), failure.SerializeToString())
            job.timers.set_from_thread(
                f"failed {generation}",
                time.monotonic(),
                lambda _: self._own_key.runs(generation, Run.FAILED) if self._is_wanted(generation) else None,
            )

        job.writes.until_done(f"failure {failure.worker_id}", write)

    def _is_wanted(self, generation: int) -> bool:
        return self._wanted is not None and self._wanted.number == generation


def _not_begun(error: BaguaError) -> ExitCause:
    """Returns the cause of a worker that could not be started. It counts as the script's: retrying without end would
    not help."""
    return ExitCause(error.exit_code, None, in_utf8(str(error)), "", True)
