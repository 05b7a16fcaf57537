"""The leader of a job on one machine: bagua_agent's decisions, without etcd and without agents.

Each worker is a node of its own with one slot. What workers say over their sessions and how they end becomes the events
of the real state machine; records that it writes go to all workers at once. The rules by which an agent turns words of
its workers into keys are those of bagua_agent/node/live_workers.py.
"""

from __future__ import annotations

import queue
import signal
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from bagua_agent.membership import events as ev
from bagua_agent.membership.actions import (
    Action,
    ProbeAgents,
    WakeAt,
    WriteGeneration,
    WriteHangOrder,
    WriteResult,
)
from bagua_agent.membership.policy import Policy
from bagua_agent.membership.state_machine import machine
from bagua_agent.membership.view import (
    AgentView,
    FailureView,
    MemberView,
    ProbeVerdict,
    SuspicionView,
)
from bagua_agent.rpc.session_server import SessionServer
from bagua_contract import membership_pb2 as pb
from bagua_contract import session_pb2
from bagua_contract.records import Generation, GenerationKind, Stage, SuspicionKind

# The minimum is complete only when all that begin are ready, so there is nothing to wait for then.
POLICY = Policy(last_call_s=0.0)
LONG_AGO_S = 1000.0


class JobFailed(Exception):
    """The leader gave the job up, or refused a worker."""


class Sessions(SessionServer):
    """All workers' sessions on one socket."""

    def tell_leave_to(self, worker_id: str) -> None:
        self._tell(session_pb2.AgentMessage(leave=session_pb2.Leave()), [worker_id])


class Leader:
    """is_alive(worker_id): asked when the machine probes a node. notify(): something came into the inbox, called from
    gRPC's threads."""

    def __init__(
        self,
        socket_path: str,
        nonce: str,
        first: int,
        *,
        least: int,
        has_checkpoints: bool,
        is_alive: Callable[[str], bool],
        notify: Callable[[], None],
    ) -> None:
        self.records: list[Generation] = []
        self.entered: dict[int, set[str]] = {}  # generation -> workers that committed in it
        self.closing = False
        self.leaving: set[str] = set()
        self._is_alive = is_alive
        self._first = first
        self._inbox: queue.SimpleQueue[tuple[str, session_pb2.WorkerMessage]] = queue.SimpleQueue()

        def hear(worker_id: str, message: session_pb2.WorkerMessage) -> None:
            self._inbox.put((worker_id, message))
            notify()

        self.sessions = Sessions(socket_path, 8, hear)
        self.sessions.admit(nonce)
        self._members: dict[str, dict[str, Any]] = {}
        self._joined: dict[str, int] = {}
        self._suspected: dict[str, tuple[int, int]] = {}
        self._trained: set[str] = set()
        self._revision = 0
        self._events: deque[ev.Event] = deque()
        self.wake_at_s: float | None = None
        self._state = machine.new_state("leader", nonce, has_checkpoints=has_checkpoints)
        long_ago_s = time.monotonic() - LONG_AGO_S
        self._feed(ev.LeadershipWon(now_s=long_ago_s, revision=self._next_revision()))
        # Later ones are taken in as they come, and any number may be lost.
        self._least = least
        self._least_is_due = True
        self._feed(ev.DesiredChanged(now_s=long_ago_s, min_nodes=first, max_nodes=max(first, 1)))

    @property
    def newest(self) -> Generation | None:
        return self.records[-1] if self.records else None

    @property
    def is_committed(self) -> bool:
        """A commit in the newest record is known, so a planned change may follow."""
        return bool(self.records) and bool(self.entered.get(self.records[-1].number))

    # -- nodes

    def add_worker(self, worker_id: str) -> None:
        self.sessions.expect(worker_id)
        # In the order in which they are started, not in which they are ready: ranks are the same in each run.
        self._joined[worker_id] = self._next_revision()
        self._agent(worker_id, self._next_revision())

    def ask_to_leave(self, worker_id: str) -> None:
        self.leaving.add(worker_id)
        self._agent(worker_id, self._state.view.agents[f"n-{worker_id}"].join_revision)
        self.sessions.tell_leave_to(worker_id)

    def _agent(self, worker_id: str, revision: int) -> None:
        self._feed(
            ev.AgentSeen(
                now_s=time.monotonic(),
                agent=AgentView(
                    agent_id=f"n-{worker_id}",
                    node_name=f"host-{worker_id}",
                    slots=1,
                    topology="",
                    leaving=worker_id in self.leaving,
                    control_address="",
                    join_revision=revision,
                ),
            )
        )

    def ended(self, worker_id: str, status: int) -> None:
        """status: as Popen.returncode. Raises JobFailed if it is not how a worker of this harness ends."""
        now_s = time.monotonic()
        self.sessions.forget(worker_id)
        self._suspected.pop(worker_id, None)
        was_member = self._members.pop(worker_id, None) is not None
        if status == -signal.SIGKILL:
            self._feed(
                ev.FailureRecorded(
                    now_s=now_s,
                    failure=FailureView(
                        worker_id=worker_id,
                        node_name=f"host-{worker_id}",
                        step=0,
                        in_step=False,
                        script_failure=False,
                        summary="killed by SIGKILL",
                        order=self._next_revision(),
                        was_member=was_member,
                    ),
                )
            )
        elif status != 0:
            raise JobFailed(f"{worker_id} ended with {status}")
        elif worker_id not in self.leaving or worker_id in self._trained:
            self._feed(ev.WorkerFinished(now_s=now_s, worker_id=worker_id, agent_id=f"n-{worker_id}"))
        self._feed(ev.SuspicionCleared(now_s=now_s, worker_id=worker_id))
        self._feed(ev.MemberGone(now_s=now_s, worker_id=worker_id))
        if worker_id in self.leaving:
            self._feed(ev.AgentGone(now_s=now_s, agent_id=f"n-{worker_id}"))

    # -- what workers say

    def work(self) -> None:
        """Take in what was said, and let time pass."""
        while not self._inbox.empty():
            worker_id, message = self._inbox.get()
            self._said(worker_id, message)
        if self.wake_at_s is not None and time.monotonic() >= self.wake_at_s:
            self.wake_at_s = None
            self._feed(ev.TimePassed(now_s=time.monotonic()))

    def _said(self, worker_id: str, message: session_pb2.WorkerMessage) -> None:
        now_s = time.monotonic()
        match message.WhichOneof("kind"):
            case "hello":
                if self.newest is not None:
                    self.sessions.tell_generation(self.newest, [worker_id])
                if self.closing:
                    self.sessions.tell_close()
            case "ready":
                ready = message.ready
                self._members[worker_id] = {
                    "store_address": ready.store_address,
                    "fingerprint": dict(ready.fingerprint),
                    "committed_generation": ready.committed_generation,
                    "join_revision": self._joined[worker_id],
                    "stage": Stage(ready.stage),
                }
                self._put_member(worker_id)
            case "entered":
                self.entered.setdefault(message.entered.generation, set()).add(worker_id)
                if worker_id in self._members:
                    self._members[worker_id]["committed_generation"] = message.entered.generation
                    self._put_member(worker_id)
            case "suspected" if worker_id in self._members and self._is_alive(worker_id):
                said = message.suspected
                newest = self.newest
                if newest is not None and said.generation < newest.base:
                    return
                self._suspected[worker_id] = (said.generation, said.kind)
                self._feed(
                    ev.SuspicionRaised(
                        now_s=now_s,
                        suspicion=SuspicionView(
                            worker_id=worker_id,
                            generation=said.generation,
                            kind=SuspicionKind(said.kind),
                            hosts=tuple(said.hosts),
                            sequence=self._next_revision(),
                            detail=said.detail,
                            waited_s=said.waited_s,
                            usual_step_s=said.usual_step_s,
                        ),
                    )
                )
            case "went_on":
                if self._suspected.get(worker_id) == (message.went_on.generation, pb.Suspicion.STALLED):
                    self._clear(worker_id)
            case "training_done" if worker_id in self._members:
                self._trained.add(worker_id)
                if not self.closing:
                    self.closing = True
                    self._feed(ev.ClosingSeen(now_s=now_s, generation=message.training_done.generation))
                    self.sessions.tell_close()

    def _put_member(self, worker_id: str) -> None:
        member = self._members[worker_id]
        self._feed(
            ev.MemberReady(
                now_s=time.monotonic(),
                member=MemberView(worker_id=worker_id, agent_id=f"n-{worker_id}", slot=0, **member),
            )
        )

    def _clear(self, worker_id: str) -> None:
        del self._suspected[worker_id]
        self._feed(ev.SuspicionCleared(now_s=time.monotonic(), worker_id=worker_id))

    # -- the machine

    def _next_revision(self) -> int:
        self._revision += 1
        return self._revision

    def _feed(self, event: ev.Event) -> None:
        """One event after the other: answers to actions come after all actions of the event before."""
        self._events.append(event)
        if len(self._events) > 1:
            return
        while self._events:
            # it may have waited for one that was made later
            event = replace(self._events[0], now_s=max(self._events[0].now_s, self._state.now_s))
            outcome = machine.step(self._state, event, POLICY)
            self._state = outcome.state
            for action in outcome.actions:
                self._perform(action)
            self._events.popleft()

    def _perform(self, action: Action) -> None:
        now_s = time.monotonic()
        match action:
            case WakeAt(time_s):
                self.wake_at_s = time_s
            case WriteGeneration(generation, _):
                self._written(generation)
            case WriteResult() as result:
                self._feed(ev.ResultSeen(now_s=now_s))
                if result.exit_code:
                    raise JobFailed(result.reason)
            case ProbeAgents(questions, sequence):
                for question in questions:
                    worker_id = question.agent_id.removeprefix("n-")
                    living = (worker_id,) if self._is_alive(worker_id) else ()
                    self._feed(
                        ev.ProbeAnswered(
                            now_s=now_s,
                            agent_id=question.agent_id,
                            sequence=sequence,
                            verdict=ProbeVerdict.ALIVE,
                            workers=living,
                        )
                    )
            case WriteHangOrder(order):
                self._feed(ev.HangOrderSeen(now_s=now_s, order=order))
            case _:
                raise JobFailed(f"the leader asks for {action}")

    def _written(self, generation: Generation) -> None:
        self.records.append(generation)
        self._feed(ev.GenerationSeen(now_s=time.monotonic(), generation=generation))
        if generation.is_gathering and not generation.members:
            raise JobFailed(f"no fault comes before the first step, but {generation.reason}")
        self.sessions.tell_generation(generation)
        over_below = generation.number if generation.kind is GenerationKind.FAILOVER else generation.base
        for worker_id, (suspected, _) in list(self._suspected.items()):
            if suspected < over_below:
                self._clear(worker_id)
        if self._least_is_due and not generation.is_gathering:
            self._least_is_due = False
            self._feed(ev.DesiredChanged(now_s=time.monotonic(), min_nodes=self._least, max_nodes=16))
