"""The agent's loop: takes what happened from the inbox, asks the pure machine, does what it says.

Everything that changes the agent's mind runs in this one thread; whatever waits (store, probes, exits) runs in
others and comes back through the inbox. Owns no decision: membership/machine.py forms generations,
restart_policy.py judges failures, node_ending.py says when this node is done.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from bagua_agent import narrator
from bagua_agent.errors import InfrastructureLost
from bagua_agent.inbox import LeadershipReported, LeaseChanged, StoreChanged, StoreConnected, WorkerSaid
from bagua_agent.job_config import JobConfig
from bagua_agent.job_room import ensure_job
from bagua_agent.job_store import JobStore, is_exposed, open_store
from bagua_agent.leader_watch import LeaderWatch
from bagua_agent.leadership import (
    Elected,
    GenerationRefused,
    Leadership,
    NotElected,
    ProbeResult,
    Report,
    WriteFailed,
)
from bagua_agent.membership import actions as do
from bagua_agent.membership import events as ev
from bagua_agent.membership.machine import State, new_state, step_all
from bagua_agent.membership.policy import Policy
from bagua_agent.membership.restart_policy import judge
from bagua_agent.membership.view import FailureView
from bagua_agent.node_ending import Ending, NodeSituation, how_it_ends
from bagua_agent.node_workers import NodeWorkers
from bagua_agent.process_messages import SignalCame, WorkerExited
from bagua_agent.rpc.control_server import ControlServer
from bagua_agent.rpc.session_server import SessionServer
from bagua_agent.signals import SignalsToInbox
from bagua_agent.store.client import Put, absent
from bagua_agent.store.keys import JobKeys
from bagua_agent.store.leased_keys import LeasedKeys, LeaseLapsed
from bagua_agent.store.mirror import Change, PrefixMirror
from bagua_agent.store_events import LeaderKey, StoreEvents
from bagua_agent.timers import Timers
from bagua_agent.workers.exit_cause import ExitCause, shell_exit_code
from bagua_contract import membership_pb2 as pb
from bagua_contract import session_pb2
from bagua_contract.records import PROTOCOL_VERSION, Generation, GenerationKind

RETRY_S = 0.5
IDLE_LOOK_S = 1.0
LAST_WORDS_S = 2.0
EXIT_BEFORE_SUSPICION_S = 0.02
WAIT_WORTH_TELLING_S = 2.0
FOLLOWERS_LEAVE_S = 30.0  # how long the node that hosts etcd waits for the others to read the result


class JobLoop:
    def __init__(
        self,
        config: JobConfig,
        agent_id: str,
        node_name: str,
        address: str,
        directory: Path,
        workers: NodeWorkers,
        inbox: queue.SimpleQueue[object],
        signals: SignalsToInbox,
    ) -> None:
        self._config = config
        self._signals = signals
        self._agent_id = agent_id
        self._node_name = node_name
        self._address = address
        self._workers = workers
        self._inbox = inbox
        self._keys = JobKeys(config.job_id)
        self._policy = Policy(
            last_call_s=config.last_call_s,
            node_window_s=config.node_window_s,
            holder_timeout_s=config.holder_timeout_s if config.holder_timeout_s is not None else float("inf"),
            below_minimum_timeout_s=config.below_minimum_timeout_s,
            probe_window_s=config.probe_window_s,
        )
        self._narrator = narrator.Narrator(workers.output.say, node_name)
        self._events = StoreEvents(self._keys, self._unreadable)
        self._timers = Timers()
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="bagua-writer")
        self._closers: list[Callable[[], object]] = [lambda: self._writer.shutdown(cancel_futures=True)]
        self._state: State = new_state(agent_id)
        self._members: dict[str, pb.Member] = {}  # own workers that are ready
        self._suspicion_sequence = 0
        self._suspected: dict[str, int] = {}  # own worker -> generation of its standing suspicion
        self._steps: dict[str, tuple[int, int]] = {}  # own worker -> generation, committed steps
        self._generation: Generation | None = None
        self._generation_revision = 0
        self._leader: LeaderKey | None = None
        self._closing = False
        self._training_done: set[str] = set()
        self._result: pb.Result | None = None
        self._leaving_since_s: float | None = None
        self._leaving_signal = 0
        self._wait = ""
        self._connected = True
        self._disconnected_since_s = 0.0
        self._own_exit_code = 0
        self._session_server = SessionServer(
            str(directory / "session.sock"),
            config.slots,
            lambda worker_id, message: inbox.put(WorkerSaid(worker_id, message)),
        )
        self._closers.append(self._session_server.stop)
        for worker_id in workers.worker_ids:
            self._session_server.expect(worker_id)

    # -- joining the job

    def run(self) -> int:
        """The exit code of this node's part. Raises BaguaError when the job can't be joined."""
        if not self._open_store():
            assert self._signals.first is not None
            self._narrator.tell("interrupted before the job was joined")
            return 128 + self._signals.first
        self._control = ControlServer(
            self._address, self._config.job_id, self._agent_id, lambda: self._workers.worker_ids
        )
        self._closers.append(self._control.stop)
        spec = ensure_job(self._store, self._keys, self._config)
        # The budget is the job's, not this node's: everybody judges by the same number.
        self._policy = replace(self._policy, max_restarts=spec.max_restarts)
        self._state = new_state(self._agent_id, spec.nonce)
        self._leased = LeasedKeys(
            self._store, self._config.lease_ttl_s, lambda event: self._inbox.put(LeaseChanged(event))
        )
        self._closers.append(self._leased.close)
        self._leadership = Leadership(
            self._store,
            self._keys,
            self._leased,
            self._config.job_id,
            self._config.probe_window_s,
            lambda report: self._inbox.put(LeadershipReported(report)),
        )
        self._closers.append(self._leadership.stop)
        self._leader_watch = LeaderWatch(self._leadership, self._agent_id, self._config.probe_window_s)
        self._put_agent(leaving=False)
        self._mirror = PrefixMirror(
            self._store,
            self._keys.prefix,
            lambda changes: self._inbox.put(StoreChanged(changes)),
            lambda connected: self._inbox.put(StoreConnected(connected)),
        )
        self._mirror.start()
        self._closers.append(self._mirror.stop)
        self._session_server.admit(spec.nonce)
        self._workers.open_gates()
        self._follow_leadership(None, time.monotonic())
        while (ending := self._ending()) is None:
            self._take(self._next_message())
        return self._end(ending)

    def _open_store(self) -> bool:
        """False: a signal came first."""
        config = self._config
        opened = open_store(config, self._address, lambda: self._signals.first is not None)
        if opened is None:
            return False
        self._job_store: JobStore = opened
        self._closers.append(self._job_store.close)
        self._store = self._job_store.store
        nodes = f"{config.min_nodes}:{config.max_nodes}"
        self._narrator.tell(narrator.joining(config, self._job_store.endpoint))
        if self._job_store.server is not None and config.max_nodes > 1:
            self._narrator.tell(
                narrator.joining_command(self._job_store.endpoint, config.job_id, nodes, str(config.command))
            )
        if is_exposed(config) or (self._job_store.server is not None and config.max_nodes > 1):
            self._narrator.tell(
                "note: etcd is reached without TLS; whoever can reach it can run code in this job, "
                "so keep it on a private network"
            )
        return True

    def _put_agent(self, leaving: bool) -> None:
        agent = pb.Agent(
            protocol=PROTOCOL_VERSION,
            agent_id=self._agent_id,
            node_name=self._node_name,
            control_address=self._control.address,
            slots=self._config.slots,
            leaving=leaving,
        )
        self._leased.put(self._keys.agent(self._agent_id), agent.SerializeToString())

    # -- the loop

    def _next_message(self) -> object:
        try:
            return self._inbox.get(timeout=min(IDLE_LOOK_S, self._timers.next_in_s(time.monotonic())))
        except queue.Empty:
            return None

    def _take(self, message: object) -> None:
        now_s = time.monotonic()
        match message:
            case None:
                pass
            case WorkerSaid():
                self._worker_said(message.worker_id, message.message, now_s)
            case WorkerExited():
                self._worker_exited(message.worker_id, message.returncode, now_s)
            case StoreChanged():
                self._store_changed(message.changes, now_s)
            case StoreConnected():
                self._store_connected(message.connected, now_s)
            case LeaseChanged():
                if isinstance(message.event, LeaseLapsed):
                    self._follow_leadership(self._leader, now_s)
            case LeadershipReported():
                self._leadership_reported(message.report, now_s)
            case SignalCame():
                self._signalled(message.number, now_s)
            case _:
                raise AssertionError(f"nobody sends {message!r}")
        for due in self._timers.take_due(now_s):
            due(now_s)

    def _advance(self, *happened: ev.Event) -> None:
        """Give events to the machine and do what follows."""
        result = step_all(self._state, happened, self._policy)
        self._state = result.state
        self._narrate_wait(result.reason if self._state.leading else "")
        for action in result.actions:
            self._perform(action)

    def _narrate_wait(self, reason: str) -> None:
        """What the job waits for, if it still does after a while: most waits are over before they are read."""
        if not reason.startswith("waiting"):
            self._timers.cancel("wait")
            return
        self._timers.set_once(
            "wait",
            time.monotonic() + WAIT_WORTH_TELLING_S,
            lambda _: self._narrator.tell_once("wait", self._wait),
        )
        self._wait = reason

    def _perform(self, action: do.Action) -> None:
        match action:
            case do.WriteGeneration():
                self._leadership.write_generation(
                    action.generation,
                    self._generation_revision if action.expected_previous_number else 0,
                )
            case do.WriteResult():
                failure = self._failure_record(action.failure)
                exit_code = action.exit_code if failure is None else shell_exit_code(failure.exit_code)
                self._leadership.write_result(action.outcome, exit_code, action.reason, failure)
            case do.ProbeAgents():
                for question in action.questions:
                    self._leadership.ask(question, action.sequence)
            case do.RefuseMember():
                self._leadership.refuse(action.worker_id, action.difference)
            case do.RemoveDeadAgent():
                ids = [
                    m.worker_id for m in self._state.view.members.values() if m.agent_id == action.agent_id
                ]
                self._leadership.remove_agent(action.agent_id, action.join_revision, ids)
            case do.WakeAt():
                self._timers.set(
                    "machine", action.time_s, lambda now_s: self._advance(ev.TimePassed(now_s=now_s))
                )

    def _failure_record(self, failure: FailureView | None) -> pb.Failure | None:
        if failure is None:
            return None
        stored = self._mirror.state().get(self._keys.failure(failure.worker_id))
        return None if stored is None else pb.Failure.FromString(stored.value)

    # -- the store

    def _store_changed(self, changes: tuple[Change, ...], now_s: float) -> None:
        keys = self._keys
        happened = []
        for change in changes:
            event = self._events.event_of(change, now_s)
            if change.value is None and self._is_own(change.key):
                # A leader that took this node for dead removed it; or etcd lost its data.
                self._leased.recheck()
            if event is not None:
                happened.append(event)
            if change.key == keys.generation and isinstance(event, ev.GenerationSeen):
                self._generation_revision = change.mod_revision
                self._generation_seen(event.generation)
            elif change.key == keys.leader:
                leader = self._events.message_of(pb.Leader, change)
                if leader is not None or change.value is None:
                    self._leader = _leader_key(leader, change)
                    self._follow_leadership(self._leader, now_s)
            elif change.key == keys.closing and change.value is not None and not self._closing:
                self._closing = True
                self._session_server.tell_close()
                self._narrator.tell("every worker has committed its last step")
            elif change.key == keys.result and isinstance(event, ev.ResultSeen):
                self._result = self._events.message_of(pb.Result, change)
            elif isinstance(event, ev.MemberRefused):
                refusal = self._events.message_of(pb.Refusal, change)
                self._refused(event.worker_id, refusal.difference if refusal else "(unreadable)")
            elif change.key == keys.desired and isinstance(event, ev.DesiredChanged):
                before = self._state.view.desired
                if before is not None:
                    was, wanted = (before.min_nodes, before.max_nodes), (event.min_nodes, event.max_nodes)
                    self._narrator.tell_once("scaled", narrator.scaled(was, wanted))
        if happened:
            self._advance(*happened)

    def _is_own(self, key: str) -> bool:
        own = {self._keys.agent(self._agent_id), *(self._keys.member(w) for w in self._members)}
        return key in own and self._result is None

    def _generation_seen(self, generation: Generation) -> None:
        before, self._generation = self._generation, generation
        if before is not None and generation.number <= before.number:
            return
        self._session_server.tell_generation(generation)
        self._narrator.tell(narrator.generation_written(before, generation))
        # While a planned one is pending, what breaks the generation before it is still the leader's concern.
        over_below = generation.number if generation.kind is GenerationKind.LOSS else generation.base
        for worker_id, suspected in list(self._suspected.items()):
            if suspected < over_below:
                del self._suspected[worker_id]
                self._leased.remove(self._keys.suspicion(worker_id))

    def _refused(self, worker_id: str, difference: str) -> None:
        if worker_id in self._workers.worker_ids:
            self._narrator.tell(f"worker {worker_id} may not join: {difference}")
            self._session_server.tell_refused(worker_id, difference)

    def _unreadable(self, key: str, why: str) -> None:
        self._narrator.tell_once(
            f"unreadable {key}", f"passing over {key}: {why}; remove it with etcdctl del"
        )

    def _store_connected(self, connected: bool, now_s: float) -> None:
        if connected == self._connected:
            return
        self._connected = connected
        self._disconnected_since_s = now_s
        if connected:
            self._narrator.tell("etcd answers again")
            self._leased.recheck()
        else:
            self._narrator.tell("etcd does not answer; training goes on, changes of membership wait")

    # -- leadership

    def _follow_leadership(self, leader: LeaderKey | None, now_s: float) -> None:
        if leader is None:
            if self._state.leading:
                self._leadership.lost()
                self._advance(ev.LeadershipLost(now_s=now_s))
            if self._result is None:
                self._leadership.stand(self._agent_id, self._control.address)
        elif leader.agent_id != self._agent_id:
            if self._state.leading:
                self._leadership.lost()
                self._advance(ev.LeadershipLost(now_s=now_s))
            self._leader_watch.leader_is(leader)

    def _leadership_reported(self, report: Report, now_s: float) -> None:
        match report:
            case Elected():
                if self._state.leading:
                    self._advance(ev.LeadershipLost(now_s=now_s))
                self._narrator.tell("this node leads: it forms the generations")
                self._leader_watch.leader_is(None)
                self._advance(ev.LeadershipWon(now_s=now_s, revision=report.create_revision))
            case NotElected():
                pass
            case GenerationRefused():
                self._advance(ev.GenerationWriteRefused(now_s=now_s, number=report.number, why=report.reason))
            case ProbeResult():
                if self._leader_watch.took(report):
                    return
                self._advance(
                    ev.ProbeAnswered(
                        now_s=now_s,
                        agent_id=report.agent_id,
                        sequence=report.sequence,
                        verdict=report.verdict,
                        relayed=report.relayed,
                        workers=report.workers,
                    )
                )
            case WriteFailed():
                if report.what == "election":
                    self._timers.set("election", now_s + RETRY_S, self._stand_again)
                elif report.what == "writing the result" and self._state.leading and self._result is None:
                    self._advance(ev.ResultWriteRefused(now_s=now_s, why=report.reason))

    def _stand_again(self, now_s: float) -> None:
        if self._leader is None and not self._state.leading:
            self._follow_leadership(None, now_s)

    # -- workers

    def _worker_said(self, worker_id: str, message: session_pb2.WorkerMessage, now_s: float) -> None:
        if self._workers.get(worker_id) is None:
            return  # it ended meanwhile
        match message.WhichOneof("kind"):
            case "hello":
                self._greet(worker_id)
            case "ready":
                self._worker_ready(worker_id, message.ready)
            case "entered":
                self._worker_entered(worker_id, message.entered)
            case "progress":
                self._worker_progress(worker_id, message.progress, now_s)
            case "suspected":
                self._worker_suspects(worker_id, message.suspected, now_s)
            case "training_done":
                self._worker_trained(worker_id, message.training_done)
            case _:
                pass

    def _greet(self, worker_id: str) -> None:
        if self._generation is not None:
            self._session_server.tell_generation(self._generation, [worker_id])
        if self._leaving_since_s is not None:
            self._session_server.tell_leave()
        if self._closing:
            self._session_server.tell_close()

    def _worker_ready(self, worker_id: str, ready: session_pb2.Ready) -> None:
        worker = self._workers.get(worker_id)
        assert worker is not None
        worker.was_ready = True
        member = pb.Member(
            protocol=PROTOCOL_VERSION,
            worker_id=worker_id,
            agent_id=self._agent_id,
            slot=worker.slot,
            store_address=ready.store_address,
            fingerprint=dict(ready.fingerprint),
            committed_generation=ready.committed_generation,
        )
        self._members[worker_id] = member
        self._put_member(member)

    def _put_member(self, member: pb.Member) -> None:
        self._leased.put(self._keys.member(member.worker_id), member.SerializeToString())

    def _worker_entered(self, worker_id: str, entered: session_pb2.Entered) -> None:
        member = self._members.get(worker_id)
        if member is None:
            return
        member.committed_generation = entered.generation
        self._put_member(member)
        self._narrator.tell_once(
            "in force", f"generation {entered.generation} is in force from step {entered.step}"
        )

    def _worker_progress(self, worker_id: str, progress: session_pb2.Progress, now_s: float) -> None:
        self._steps[worker_id] = (progress.generation, progress.step)
        if progress.generation and worker_id == min(self._workers.worker_ids, default=worker_id):
            self._narrator.tell_progress(
                now_s,
                narrator.progress(
                    progress.epoch,
                    progress.step,
                    progress.steps_per_s,
                    dict(progress.metrics),
                    progress.generation,
                ),
            )

    def _worker_suspects(self, worker_id: str, suspected: session_pb2.Suspected, now_s: float) -> None:
        if self._generation is not None and suspected.generation < self._generation.base:
            return
        if self._workers.an_exit_is_on_its_way():
            # The cause is here: told first, it spares the job a generation in which "everybody lives".
            self._timers.set(
                f"suspicion {worker_id}",
                now_s + EXIT_BEFORE_SUSPICION_S,
                lambda later_s: self._worker_suspects(worker_id, suspected, later_s),
            )
            return
        self._suspicion_sequence += 1
        self._suspected[worker_id] = suspected.generation
        suspicion = pb.Suspicion(
            worker_id=worker_id,
            generation=suspected.generation,
            kind=suspected.kind,
            hosts=suspected.hosts,
            detail=suspected.detail,
            sequence=self._suspicion_sequence,
        )
        self._leased.put(self._keys.suspicion(worker_id), suspicion.SerializeToString())
        if suspected.kind == pb.Suspicion.BROKEN or "can't be built" in suspected.detail:
            self._narrator.tell_once(f"suspicion {worker_id}", f"a worker can't go on: {suspected.detail}")
        # Should the leader itself be what is missing, somebody else has to find out.
        relay = next(
            (
                a.control_address
                for a in self._state.view.agents.values()
                if self._leader and a.agent_id not in (self._agent_id, self._leader.agent_id)
            ),
            "",
        )
        self._leader_watch.suspect(relay, now_s)

    def _worker_trained(self, worker_id: str, done: session_pb2.TrainingDone) -> None:
        self._training_done.add(worker_id)
        closing = pb.Closing(worker_id=worker_id, generation=done.generation, step=done.step)
        keys = self._keys
        self._write_until_done(
            "closing",
            lambda: self._store.transact(
                [absent(keys.closing)], [Put(keys.closing, closing.SerializeToString())]
            ),
        )

    def _write_until_done(self, what: str, write: Callable[[], object]) -> None:
        """Store writes that are desired state: tried again until etcd took them."""

        def attempt() -> None:
            try:
                write()
            except InfrastructureLost:
                self._timers.set_from_thread(
                    f"write {what}", time.monotonic() + RETRY_S, lambda _: self._writer.submit(attempt)
                )

        self._writer.submit(attempt)

    def _worker_exited(self, worker_id: str, returncode: int, now_s: float) -> None:
        if self._workers.get(worker_id) is None:
            return
        worker, cause = self._workers.ended(worker_id, returncode)
        self._session_server.forget(worker_id)
        was_member = self._members.pop(worker_id, None) is not None
        keys = self._keys

        def gone() -> None:
            for key in (keys.suspicion(worker_id), keys.member(worker_id)):
                self._leased.remove(key)

        def gone_after(write: Callable[[], object]) -> None:
            write()
            gone()

        self._suspected.pop(worker_id, None)
        if returncode == 0 and self._leaving_since_s is not None and worker_id not in self._training_done:
            gone()  # it left, which says nothing about the end of the job
            return
        if returncode == 0:
            self._write_until_done(
                f"finished {worker_id}",
                lambda: gone_after(lambda: self._store.put(keys.finished(worker_id), b"\x01")),
            )
            return
        if not self._stopping:
            self._own_exit_code = shell_exit_code(returncode)
        if self._stopping:
            gone()
            return
        if was_member and not cause.script_failure:
            gone()  # at once: the others wait for nothing else
        failure = self._failure(worker_id, worker.slot, returncode, cause, str(worker.files.directory))
        self._write_until_done(
            f"failure {worker_id}",
            lambda: gone_after(lambda: self._store.put(keys.failure(worker_id), failure.SerializeToString())),
        )
        self._respawn(worker.slot, cause, failure, now_s)

    @property
    def _stopping(self) -> bool:
        """Ends of workers are expected."""
        return self._result is not None or self._leaving_since_s is not None

    def _failure(
        self, worker_id: str, slot: int, returncode: int, cause: ExitCause, log_path: str
    ) -> pb.Failure:
        placement = self._generation.placement_of(worker_id) if self._generation else None
        generation, steps = self._steps.get(worker_id, (0, 0))
        return pb.Failure(
            worker_id=worker_id,
            agent_id=self._agent_id,
            node_name=self._node_name,
            slot=slot,
            global_rank=placement.global_rank if placement else -1,
            exit_code=returncode,
            cause=cause.summary,
            log_path=log_path,
            step=steps,
            in_step=generation > 0,
            script_failure=cause.script_failure,
            traceback_tail=cause.traceback_tail,
        )

    def _respawn(self, slot: int, cause: ExitCause, failure: pb.Failure, now_s: float) -> None:
        where = f"worker in slot {slot}"
        known = [f for f in self._state.view.failures.values() if f.worker_id != failure.worker_id]
        new = FailureView(
            worker_id=failure.worker_id,
            node_name=self._node_name,
            step=failure.step,
            in_step=failure.in_step,
            script_failure=failure.script_failure,
            summary=failure.cause,
            order=1 << 62,
        )
        if self._closing or judge([*known, new], self._policy.max_restarts).fail:
            self._narrator.tell(f"{where} failed: {cause.summary}")
            return  # the leader writes the result
        delay_s = self._workers.respawn_delay_s(slot)
        later = f" in {delay_s:g} s" if delay_s else ""
        self._narrator.tell(f"{where} ended: {cause.summary}; starting another{later}")

        def spawn(_: float) -> None:
            if not self._stopping and not self._closing:
                self._session_server.expect(self._workers.spawn(slot))

        self._timers.set(f"respawn {slot}", now_s + delay_s, spawn)

    # -- leaving and ending

    def _signalled(self, number: int, now_s: float) -> None:
        if self._leaving_since_s is not None:
            self._leaving_since_s = float("-inf")  # the second time: now
            return
        self._leaving_since_s = now_s
        self._leaving_signal = number
        self._put_agent(leaving=True)
        self._session_server.tell_leave()
        self._narrator.tell("leaving at the next step boundary; a second signal ends it at once")
        if not self._members:
            self._leaving_since_s = float("-inf")  # nothing has begun here, so there is nothing to wait for

    def _ending(self) -> Ending | None:
        now_s = time.monotonic()
        waited_s = None if self._leaving_since_s is None else now_s - self._leaving_since_s
        others = [
            a for a in self._state.view.agents.values() if a.agent_id != self._agent_id and not a.leaving
        ]
        return how_it_ends(
            NodeSituation(
                workers_running=len(self._workers.worker_ids),
                result=None if self._result is None else (self._result.outcome, self._result.exit_code),
                leaving_signal=self._leaving_signal,
                leaving_for_s=waited_s,
                shutdown_timeout_s=self._config.shutdown_timeout_s,
                job_goes_on=bool(others) and self._result is None,
                trained=bool(self._training_done),
                store_away_for_s=0.0 if self._connected else now_s - self._disconnected_since_s,
                own_exit_code=self._own_exit_code,
            )
        )

    def _end(self, ending: Ending) -> int:
        if ending.end_workers_within_s is not None:
            self._workers.end_all(ending.end_workers_within_s)
        if self._result is not None:
            for line in narrator.result(self._config.job_id, self._result):
                self._narrator.tell(line)
        elif ending.reason:
            self._narrator.tell(ending.reason)
        self._session_server.stop()
        if self._connected:
            try:
                self._writer.submit(lambda: None).result(timeout=LAST_WORDS_S)
            except TimeoutError:
                self._narrator.tell("etcd did not take this node's last words in time")
            self._leased.flush(LAST_WORDS_S)
            self._wait_for_followers()
        return ending.exit_code

    def _wait_for_followers(self) -> None:
        """The node that hosts etcd goes last, so that the others learn how it ended."""
        if self._job_store.server is None or self._config.max_nodes == 1:
            return
        deadline_s = time.monotonic() + FOLLOWERS_LEAVE_S
        while time.monotonic() < deadline_s:
            if not [a for a in self._state.view.agents if a != self._agent_id]:
                return
            try:
                message = self._inbox.get(timeout=0.2)
            except queue.Empty:
                continue
            if isinstance(message, StoreChanged):
                self._store_changed(message.changes, time.monotonic())
            elif isinstance(message, SignalCame):
                return

    def close(self) -> None:
        """Everything that `run` and the constructor opened, last first, whatever fails on the way."""
        with ExitStack() as stack:
            for closer in self._closers:
                stack.callback(closer)


def _leader_key(leader: pb.Leader | None, change: Change) -> LeaderKey | None:
    if leader is None:
        return None
    return LeaderKey(leader.agent_id, leader.control_address, change.create_revision)
