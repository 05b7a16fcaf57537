"""Connects this node's workers with the job in live mode, where workers stay while generations change.

Writes workers' messages from their sessions as keys in the store, and sends changes of the job to them as messages.
One way of running workers (worker_lifecycle.py). Decides nothing about membership; worker_exits.py handles their ends.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable

from bagua_agent.config.job_config import SHUTDOWN_TIMEOUT_S
from bagua_agent.etcd.client import Put
from bagua_agent.history import job_history
from bagua_agent.job_state import console
from bagua_agent.job_state.context import JoinedJob
from bagua_agent.membership.failures.secondary_failure import (
    NO_CO_WORKERS,
    CoWorkers,
    co_workers_after,
    co_workers_in,
)
from bagua_agent.membership.policy import Policy
from bagua_agent.node.node_workers import NodeWorkers
from bagua_agent.node.replicas_here import ReplicasHere
from bagua_agent.node.silent_joiners import SilentJoiners, written_again
from bagua_agent.node.worker_exits import LastSeen, WorkerExits
from bagua_agent.node.worker_lifecycle import LEADER_AGAIN_S
from bagua_agent.rpc.session_server import SessionServer
from bagua_contract import membership_pb2 as pb
from bagua_contract import session_pb2
from bagua_contract.records import PROTOCOL_VERSION, Generation, GenerationKind, Stage, SuspicionKind
from bagua_contract.replica import Replica

EXIT_BEFORE_SUSPICION_S = 0.02
# Workers that leave have so much less than their node's grace period: to end, and for their node to say so in etcd.
MARGIN_S = 3.0

STARTS_AGAIN = "the job's first workers start again"
LONGEST_PROBLEM = 500  # characters of a worker's text inside a record


def workers_share_s(grace_s: float) -> float:
    """Returns how much of the node's grace period its workers get. Half of a short one: never time that the node itself
    needs."""
    return max(grace_s - MARGIN_S, grace_s / 2)


def usable_last_checkpoint(told: pb.LastCheckpoint) -> pb.LastCheckpoint | None:
    """Returns a worker's report of its part of the last checkpoint, fit for a record; None if no reader would accept
    it."""
    if told.parts and told.part >= told.parts:
        return None
    kept = pb.LastCheckpoint()
    kept.CopyFrom(told)
    kept.problem = told.problem[:LONGEST_PROBLEM]
    return kept


def must_start_again(
    stage: Stage, worker_id: str, listed_in: int, gathering: Generation, *, answered: bool = False
) -> bool:
    """Tells whether a worker has gone further in its script than the point at which `gathering` begins. The leader may
    list such a worker, because its key said WAITING until a moment ago.

    listed_in: the number of the newest generation before that listed it; 0: none did. answered: a job that trained
    answered it before its loop.
    """
    if answered or 0 < listed_in < gathering.number:
        return True
    return stage not in (Stage.WAITING, Stage.ASSEMBLING) and gathering.placement_of(worker_id) is None


_STAGES = frozenset(stage.value for stage in Stage)


class LiveWorkers:
    """Runs this node's workers in live mode; implements WorkerLifecycle. on_suspicion(now_s): a worker here can't go
    on, whatever the cause. on_slot_given_up(): this node runs one worker less from now on."""

    def __init__(
        self,
        job: JoinedJob,
        workers: NodeWorkers,
        sessions: SessionServer,
        policy: Policy,
        on_suspicion: Callable[[float], None],
        on_slot_given_up: Callable[[], None],
        shutdown_timeout_s: float = SHUTDOWN_TIMEOUT_S,
    ) -> None:
        self._job = job
        self._workers = workers
        self._sessions = sessions
        self._on_suspicion = on_suspicion
        self._exits = WorkerExits(job, workers, policy, on_slot_given_up)
        self._replaces_hung = policy.hang_timeout_s is not None
        self._silent = SilentJoiners()
        self._newest: Generation | None = None  # record that was followed
        self._replicas = ReplicasHere(
            job, workers, sessions, workers_share_s(shutdown_timeout_s), self._assembled
        )
        self._members: dict[str, pb.Member] = {}
        self._suspicion_sequence = 0
        # worker -> generation and kind of its standing suspicion
        self._suspected: dict[str, tuple[int, pb.Suspicion.Kind]] = {}
        self._told_kinds: set[pb.Suspicion.Kind] = set()  # of suspicions, since the newest record
        self._progress_of: dict[str, session_pb2.Progress] = {}  # the last report of each worker here
        self._training_done: set[str] = set()
        self._listed: dict[
            str, tuple[int, int]
        ] = {}  # worker -> newest generation that listed it, its world size
        self._left_out_of: dict[str, int] = {}  # worker -> newest generation that lists it no more
        self._answered: set[str] = set()  # workers that a job that trained answered before their loops
        self._last_checkpoints: dict[str, pb.LastCheckpoint] = {}  # of workers that left, as they said
        self._co_workers: dict[str, CoWorkers] = {}  # of this node's workers
        self._interrupted = False  # workers here got SIGINT in the middle of a step

    # -- what the job says

    def begin(self) -> None:
        self._sessions.admit(self._job.seen.spec.nonce)
        timers = self._job.timers
        self._workers.when_startable(
            lambda: timers.set_from_thread("begin", time.monotonic(), lambda _: self._start())
        )

    def _start(self) -> None:
        if self._job.seen.stopping:
            self._workers.dismiss()
            return
        for slot in self._workers.begin():
            self._exits.start_worker(slot, time.monotonic())

    def follow(self, generation: Generation) -> None:
        if generation.kind is GenerationKind.RESTART:
            return  # written before the job became live
        if generation.is_gathering:
            self._end_those_before(generation)
        self._end_silent(generation)
        self._newest = generation
        self._sessions.tell_generation(generation)
        self._told_kinds.clear()
        for member in generation.members:
            if self._workers.get(member.worker_id) is not None:
                known = self._co_workers.get(member.worker_id, NO_CO_WORKERS)
                self._co_workers[member.worker_id] = co_workers_after(known, member.worker_id, generation)
                self._listed[member.worker_id] = (generation.number, generation.world_size)
        if generation.members and not generation.is_gathering and generation.replica_size == 1:
            left_out = self._listed.keys() - {m.worker_id for m in generation.members}
            self._left_out_of.update(dict.fromkeys(left_out, generation.number))
        self._exits.records_came()
        # While a planned one is pending, what breaks the generation before it is still the leader's concern.
        over_below = generation.number if generation.kind is GenerationKind.FAILOVER else generation.base
        for worker_id, (suspected, _) in list(self._suspected.items()):
            if suspected < over_below:
                self._clear_suspicion(worker_id)

    def _end_those_before(self, gathering: Generation) -> None:
        """Ends the workers here that are ahead of `gathering`, in which the first workers meet anew. Their successors
        start from the beginning of the script, as all others do."""
        for worker_id, member in self._members.items():
            listed_in = self._listed.get(worker_id, (0, 0))[0]
            answered = worker_id in self._answered
            if must_start_again(Stage(member.stage), worker_id, listed_in, gathering, answered=answered):
                self._workers.kill(worker_id, STARTS_AGAIN)

    def _end_silent(self, generation: Generation) -> None:
        listed = [m.worker_id for m in generation.members if self._workers.get(m.worker_id) is not None]
        silent = self._silent.follow(generation.number, listed, time.monotonic())
        if not silent or not self._replaces_hung:
            return
        seen = self._job.seen
        unbuilt = any(s.kind is SuspicionKind.UNBUILT for s in seen.view.suspicions.values())
        if unbuilt or (not seen.whole and written_again(self._newest, generation)):
            for joiner in silent:
                self._workers.kill(joiner.worker_id, joiner.reason)

    def follow_replicas(self, now_s: float) -> None:
        self._replicas.look(now_s)

    def lost_touch(self, agent_id: str, now_s: float) -> None:
        self._replicas.lost_touch(agent_id, now_s)

    def _assembled(self, replica: Replica) -> None:
        """Records which workers share the replica with each worker here. So their ends explain each other before a
        generation lists them."""
        for worker_id in replica.worker_ids:
            if self._workers.get(worker_id) is not None and worker_id not in self._co_workers:
                self._co_workers[worker_id] = co_workers_in(replica, worker_id)

    def close_joins(self) -> None:
        self._sessions.tell_close()

    def refuse(self, worker_id: str, difference: str) -> None:
        if worker_id in self._workers.worker_ids:
            self._job.terminal.tell(f"worker {worker_id} may not join: {difference}")
            self._sessions.tell_refused(worker_id, difference)

    def met(self, generation: int, address: str) -> None:
        """Does nothing: only jobs in restart mode have meetings."""

    def leave(self) -> str:
        self._tell_leave()
        return "at the next step boundary"

    def _tell_leave(self) -> None:
        seen = self._job.seen
        self._sessions.tell_leave(workers_share_s(seen.leave_within_s), seen.leaving_signal == signal.SIGINT)

    def interrupt(self) -> None:
        self._interrupted = True
        self._workers.signal_all(signal.SIGINT)

    # -- what the workers do

    def said(self, worker_id: str, message: session_pb2.WorkerMessage, now_s: float) -> None:
        if self._workers.get(worker_id) is None:
            return  # it ended meanwhile
        self._silent.heard(worker_id)
        match message.WhichOneof("kind"):
            case "hello":
                self._greet(worker_id)
            case "ready":
                self._ready(worker_id, message.ready)
            case "entered":
                self._entered(worker_id, message.entered, now_s)
            case "progress":
                self._progress(worker_id, message.progress, now_s)
            case "suspected":
                self._suspects(worker_id, message.suspected, now_s)
            case "went_on":
                self._went_on(worker_id, message.went_on.generation)
            case "straggler":
                self._straggles(message.straggler, now_s)
            case "left":
                if message.left.HasField("last") and (last := usable_last_checkpoint(message.left.last)):
                    self._last_checkpoints[worker_id] = last
            case "training_done":
                self._trained(worker_id, message.training_done)
            case _:
                pass

    def exited(self, worker_id: str, returncode: int, now_s: float) -> None:
        if self._workers.get(worker_id) is None:
            return
        self._sessions.forget(worker_id)
        self._silent.heard(worker_id)
        self._suspected.pop(worker_id, None)
        self._answered.discard(worker_id)
        self._job.seen.worker_waits_no_more(worker_id)
        progress = self._progress_of.pop(worker_id, None)
        last = LastSeen(
            was_member=self._members.pop(worker_id, None) is not None,
            trained=worker_id in self._training_done,
            generation=progress.generation if progress is not None else 0,
            steps=progress.step if progress is not None else 0,
            joining=progress.joining if progress is not None else False,
            co_workers=self._co_workers.pop(worker_id, NO_CO_WORKERS),
            listed=self._listed.pop(worker_id, (0, 0)),
            last_checkpoint=self._last_checkpoints.pop(worker_id, None),
            left_alone=self._replicas.leaves_alone(worker_id),
            left_out=(progress.generation if progress is not None else 0)
            < self._left_out_of.pop(worker_id, 0),
        )
        unexpected = self._exits.take(worker_id, returncode, last, now_s)
        self._replicas.ended(worker_id, unexpected=unexpected)

    def progress_of(self, worker_id: str) -> session_pb2.Progress | None:
        return self._progress_of.get(worker_id)

    @property
    def awaits_generation(self) -> bool:
        # a stall may pass, and what can't be built leaves the generation in force
        return any(kind == pb.Suspicion.BROKEN for _, kind in self._suspected.values())

    # -- what the node's end depends on

    @property
    def ready_workers(self) -> frozenset[str]:
        return frozenset(self._members)

    @property
    def trained(self) -> bool:
        return bool(self._training_done)

    @property
    def exit_code(self) -> int:
        return self._exits.exit_code

    # -- one message each

    def _greet(self, worker_id: str) -> None:
        seen = self._job.seen
        if seen.generation is not None and seen.generation.kind is not GenerationKind.RESTART:
            self._sessions.tell_generation(seen.generation, [worker_id])
        self._replicas.greet(worker_id)
        if seen.leaving_since_s is not None:
            self._tell_leave()
        if seen.closing:
            self._sessions.tell_close()

    def _ready(self, worker_id: str, ready: session_pb2.Ready) -> None:
        worker = self._workers.get(worker_id)
        assert worker is not None
        worker.was_ready = worker.was_ready or ready.stage == pb.LOOP
        member = pb.Member(
            protocol=PROTOCOL_VERSION,
            worker_id=worker_id,
            agent_id=self._job.agent_id,
            slot=worker.slot,
            store_address=ready.store_address,
            fingerprint=dict(ready.fingerprint),
            committed_generation=ready.committed_generation,
            nonce=self._job.seen.spec.nonce,
            # of another version, or made up: at a step boundary nothing is taken for granted
            stage=ready.stage if ready.stage in _STAGES else pb.LOOP,
        )
        self._members[worker_id] = member
        if ready.stage == pb.PREPARING and not ready.gathering:
            self._answered.add(worker_id)
        self._put_member(member)
        newest = self._job.seen.generation
        late = ready.stage == pb.PREPARING and newest is not None and newest.is_gathering
        if late and newest is not None and ready.gathering != newest.number:
            # It was answered by members of a generation that is void by now.
            self._workers.kill(worker_id, STARTS_AGAIN)

    def _put_member(self, member: pb.Member) -> None:
        if member.committed_generation:
            self._job.seen.commit_here()
        self._job.leased.put(self._job.keys.member(member.worker_id), member.SerializeToString())

    def _entered(self, worker_id: str, entered: session_pb2.Entered, now_s: float) -> None:
        member = self._members.get(worker_id)
        if member is None:
            return
        member.committed_generation = entered.generation
        if (worker := self._workers.get(worker_id)) is not None:
            worker.has_committed = True
        self._put_member(member)
        self._job.change_lines.entered(worker_id, entered, now_s)
        record = self._job.seen.generation
        placement = None if record is None else record.placement_of(worker_id)
        is_first = placement is not None and placement.global_rank == 0
        if is_first and record is not None and record.number == entered.generation:
            lost_s = sum(entered.lost_s.values())
            self._job.history.own(job_history.in_force(entered.generation, console.in_force(entered), lost_s))

    def _progress(self, worker_id: str, progress: session_pb2.Progress, now_s: float) -> None:
        self._progress_of[worker_id] = progress
        if progress.generation and worker_id == min(self._workers.worker_ids, default=worker_id):
            self._job.terminal.tell_progress(now_s, lambda: self._progress_line(progress))

    def _progress_line(self, progress: session_pb2.Progress) -> str:
        record = self._job.seen.view.record(progress.generation)
        members = () if record is None else record.members
        here = sum(m.agent_id == self._job.agent_id for m in members)
        # A worker's numbers are of its own share of the batch. Of other nodes' numbers a step's last reduction
        # carries the loss; the others are asked for by `top` and the page alone.
        reports = [p for p in self._progress_of.values() if p.generation == progress.generation]
        reporting = sum(bool(p.metrics) for p in reports)
        # a record that is not known here any more may list other nodes
        world_size = len(members) or 1
        whose, loss = (
            console.whose_metrics(reporting, here, world_size),
            console.job_loss(progress, world_size),
        )
        return console.progress(progress, console.mean_metrics(reports), whose, loss)

    def _suspects(self, worker_id: str, suspected: session_pb2.Suspected, now_s: float) -> None:
        job = self._job
        if job.seen.generation is not None and suspected.generation < job.seen.generation.base:
            return
        if self._workers.an_exit_is_on_its_way():
            # The cause is here: reported first, it saves the job a generation of the same members.
            job.timers.set(
                f"suspicion {worker_id}",
                now_s + EXIT_BEFORE_SUSPICION_S,
                lambda later_s: self._suspects(worker_id, suspected, later_s),
            )
            return
        self._suspicion_sequence += 1
        self._suspected[worker_id] = (suspected.generation, suspected.kind)
        job.seen.worker_waits(worker_id, suspected.generation)
        suspicion = pb.Suspicion(
            worker_id=worker_id,
            generation=suspected.generation,
            kind=suspected.kind,
            hosts=suspected.hosts,
            detail=suspected.detail,
            sequence=self._suspicion_sequence,
            waited_s=suspected.waited_s,
            usual_step_s=suspected.usual_step_s,
            waits_in=suspected.waits_in if suspected.HasField("waits_in") else None,
        )
        job.leased.put(job.keys.suspicion(worker_id), suspicion.SerializeToString())
        # A stall may pass. Of what the workers here say of one loss the first line is enough.
        if suspected.kind != pb.Suspicion.STALLED and suspected.kind not in self._told_kinds:
            self._told_kinds.add(suspected.kind)
            job.terminal.tell_of_worker(now_s, f"suspicion {worker_id}", console.suspicion(suspected))
        self._ask_for_the_leader(now_s)

    def _ask_for_the_leader(self, now_s: float) -> None:
        if self._suspected:
            self._on_suspicion(now_s)
            self._job.timers.set("leader asked for", now_s + LEADER_AGAIN_S, self._ask_for_the_leader)

    def _went_on(self, worker_id: str, generation: int) -> None:
        """Withdraws the suspicion of a stall, which is over; other suspicions remain until a generation ends them."""
        self._job.timers.cancel(f"suspicion {worker_id}")
        if self._suspected.get(worker_id) == (generation, pb.Suspicion.STALLED):
            self._clear_suspicion(worker_id)

    def _clear_suspicion(self, worker_id: str) -> None:
        del self._suspected[worker_id]
        self._job.seen.worker_waits_no_more(worker_id)
        self._job.leased.remove(self._job.keys.suspicion(worker_id))

    def _straggles(self, told: session_pb2.Straggler, now_s: float) -> None:
        generation = self._job.seen.generation
        placement = None
        if generation is not None and generation.number == told.generation:
            placement = next((m for m in generation.members if m.global_rank == told.global_rank), None)
        # a topic for each rank that there is, not for each number that a worker may say
        topic = "straggler" if placement is None else f"straggler {placement.global_rank}"
        self._job.terminal.tell_of_worker(now_s, topic, console.straggler(told, placement))

    def _trained(self, worker_id: str, done: session_pb2.TrainingDone) -> None:
        if worker_id not in self._members:
            return  # it was never a member, so its report closes nothing
        if self._interrupted:
            return  # a script that catches the interrupt and ends with 0 was not done with its training
        self._training_done.add(worker_id)
        closing = pb.Closing(worker_id=worker_id, generation=done.generation, step=done.step)
        job, key, value = self._job, self._job.keys.closing, closing.SerializeToString()
        job.writes.until_done(
            "closing", lambda: job.store.transact([job.seen.unwritten(key)], [Put(key, value)])
        )
