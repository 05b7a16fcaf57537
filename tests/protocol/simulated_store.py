"""The store and the leader of a simulated job: keys, watches, leases, elections, probes.

Drives the real bagua_agent.membership.state_machine.machine at the agent that leads, and the real LeaderWatch at every
agent. Knows workers only by their keys.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

from bagua_agent.job_state.decode import LeaderKey
from bagua_agent.leadership.leader_probe import DeadLeader, LeaderWatch
from bagua_agent.leadership.probes import Probes
from bagua_agent.leadership.reports import ProbeResult
from bagua_agent.membership import events as ev
from bagua_agent.membership.actions import (
    Action,
    ProbeAgents,
    Question,
    RefuseMember,
    RemoveDeadAgent,
    WakeAt,
    WriteGeneration,
    WriteResult,
)
from bagua_agent.membership.policy import Policy
from bagua_agent.membership.state_machine import machine
from bagua_agent.membership.view import AgentView, ProbeVerdict
from bagua_contract.records import Generation

LEASE_S = 3.0


@dataclass
class Node:
    """One agent. newest, closing: what it saw in the store. cut: no network. thaw_at_s: frozen until then."""

    agent_id: str
    slots: int
    alive: bool = True
    cut: bool = False
    thaw_at_s: float = 0.0
    leaving: bool = False
    revision: int = 0  # of its key; 0: it has none
    seen: int = 0  # log entries applied
    newest: Generation | None = None
    closing: bool = False
    state: machine.State | None = None  # while it leads
    lease: int = 0  # counts renewals, so that an old expiry differs from a new one
    wake: int = 0
    watch: LeaderWatch | None = None


@dataclass
class Simulation:
    """Virtual time, and the store. Everything random comes from one seeded source."""

    seed: int
    random: random.Random = field(init=False)
    now_s: float = 0.0
    queue: list[tuple[float, int, str, Callable[[], None]]] = field(default_factory=list)
    sequence: int = 0
    story: list[str] = field(default_factory=list)
    nodes: dict[str, Node] = field(default_factory=dict)
    log: list[tuple[str, type[ev.Event], dict[str, Any]]] = field(default_factory=list)
    keys: dict[str, tuple[type[ev.Event], dict[str, Any]]] = field(default_factory=dict)
    leader: tuple[str, int] | None = None
    records: dict[int, Generation] = field(default_factory=dict)
    result: WriteResult | None = None
    policy: Policy = field(
        default_factory=lambda: Policy(holder_timeout_s=20.0, below_minimum_timeout_s=20.0)
    )

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)

    # -- time

    def say(self, text: str) -> None:
        self.story.append(f"{self.now_s:8.3f} {text}")

    def latency_s(self, low: float = 0.001, high: float = 0.02) -> float:
        return self.random.uniform(low, high)

    def after(self, delay_s: float, agent_id: str, act: Callable[[], None]) -> None:
        """Run `act` then, unless that agent's host is dead; later, if it is frozen. Empty: no host."""
        self.sequence += 1
        heapq.heappush(self.queue, (self.now_s + delay_s, self.sequence, agent_id, act))

    def run(self, until_s: float) -> None:
        while self.queue and self.queue[0][0] <= until_s and not self.is_over():
            self.now_s, _, agent_id, act = heapq.heappop(self.queue)
            node = self.nodes.get(agent_id)
            if node is not None and not node.alive:
                continue
            if node is not None and node.thaw_at_s > self.now_s:
                self.after(node.thaw_at_s - self.now_s, agent_id, act)
                continue
            act()

    def is_over(self) -> bool:
        return self.result is not None

    # -- hooks for the workers' side

    def workers_of(self, node: Node) -> tuple[str, ...]:
        raise NotImplementedError

    def news(self, node: Node) -> None:
        raise NotImplementedError

    def count(self, what: str) -> None:
        raise NotImplementedError

    def keys_removed(self, node: Node) -> None:
        raise NotImplementedError

    def keys_back(self, node: Node) -> None:
        raise NotImplementedError

    def generation_written(self, generation: Generation) -> None:
        raise NotImplementedError

    # -- keys

    @property
    def generation(self) -> Generation | None:
        return self.records[max(self.records)] if self.records else None

    def put(self, key: str, kind: type[ev.Event], /, **values: Any) -> None:
        self.keys[key] = (kind, values)
        self._logged(key, kind, values)

    def delete(self, key: str, kind: type[ev.Event], /, **values: Any) -> None:
        if self.keys.pop(key, None) is not None:
            self._logged(key, kind, values)

    def _logged(self, key: str, kind: type[ev.Event], values: dict[str, Any]) -> None:
        self.log.append((key, kind, values))
        for node in self.nodes.values():
            self.after(self.latency_s(), node.agent_id, lambda node=node: self._deliver(node))  # type: ignore[misc]

    def _deliver(self, node: Node) -> None:
        """Apply what the watch brings, in order. After a cut only the newest values are left to see."""
        if node.cut:
            return
        changed = False
        while node.seen < len(self.log):
            _, kind, values = self.log[node.seen]
            node.seen += 1
            if kind is ev.GenerationSeen:
                node.newest, changed = values["generation"], True
            if kind is ev.ClosingSeen:
                node.closing, changed = True, True
            if node.state is not None:
                self.feed(node, kind(now_s=self.now_s, **values))
        if changed:
            self.news(node)

    def resync(self, node: Node) -> None:
        node.seen = len(self.log)
        node.newest = self.generation
        node.closing = "closing" in self.keys
        node.state = None
        if self._leads(node):
            # Its picture has gaps; who leads next reads the store anew.
            self.leader = None
            self.after(self.latency_s(), "", self.elect)
        self.keys_back(node)
        self.news(node)

    def put_agent(self, node: Node) -> None:
        node.revision = node.revision or len(self.log) + 1
        self.put(
            f"agents/{node.agent_id}",
            ev.AgentSeen,
            agent=AgentView(
                agent_id=node.agent_id,
                node_name=f"host-{node.agent_id}",
                slots=node.slots,
                topology="",
                leaving=node.leaving,
                control_address=f"{node.agent_id}:1",
                join_revision=node.revision,
            ),
        )

    def remove_agent(self, node: Node) -> None:
        """Its lease ended, or its death was confirmed."""
        self.say(f"keys of {node.agent_id} removed")
        node.revision = 0
        self.delete(f"agents/{node.agent_id}", ev.AgentGone, agent_id=node.agent_id)
        self.keys_removed(node)
        if self.leader is not None and self.leader[0] == node.agent_id:
            self.leader = None
            self.after(self.latency_s(), "", self.elect)
        if node.alive and not node.cut:
            self.after(self.latency_s(0.05, 0.3), node.agent_id, lambda: self.put_again(node))

    def put_again(self, node: Node) -> None:
        if node.revision == 0 and not node.cut and not self.is_over():
            self.put_agent(node)
            self.keys_back(node)

    def lapse(self, node: Node, after_s: float = LEASE_S) -> None:
        """The node stopped renewing: its keys go, unless it is back by then."""
        node.lease += 1
        lease = node.lease

        def expire() -> None:
            if node.lease == lease and node.revision:
                self.remove_agent(node)

        self.after(after_s, "", expire)

    # -- looking after the leader

    def suspect_leader(self, node: Node) -> None:
        """A worker of `node` can't go on."""
        if self.leader is None or self.leader[0] == node.agent_id:
            return
        agent_id, create_revision = self.leader
        if node.watch is None:
            asks = cast(Probes, _Asks(self, node))
            window_s = self.policy.probe_window_s
            node.watch = LeaderWatch(asks, window_s, lambda dead: self._found_dead(node, dead))
        node.watch.leader_is(LeaderKey(agent_id, agent_id, create_revision))
        others = [n.agent_id for n in self.nodes.values() if n.revision and n.agent_id not in self.leader]
        relay = next((a for a in others if a != node.agent_id), "")
        node.watch.suspect(relay, self.nodes[agent_id].revision, self.now_s)

    def _found_dead(self, node: Node, dead: DeadLeader) -> None:
        """The transaction that removes the leader's keys, once it reaches the store."""

        def transact() -> None:
            target = self.nodes[dead.agent_id]
            stands = (self.leader, target.revision)
            if node.cut or stands != ((dead.agent_id, dead.create_revision), dead.agent_revision):
                return
            self.count("living leader removed" if target.alive else "dead leader removed")
            self.remove_agent(target)

        self.after(self.latency_s(), "", transact)

    # -- leading

    def elect(self) -> None:
        able = [n for n in self.nodes.values() if n.alive and not n.cut and n.thaw_at_s <= self.now_s]
        if self.leader is not None or self.is_over():
            return
        if not able:
            self.after(0.2, "", self.elect)
            return
        node = self.random.choice(able)
        node.state = None
        self._deliver(node)
        self.leader = (node.agent_id, len(self.log) + 1)
        self.say(f"{node.agent_id} leads")
        node.state = machine.new_state(node.agent_id)
        picture = [kind(now_s=self.now_s, **values) for kind, values in self.keys.values()]
        node.state = machine.step_all(node.state, picture, self.policy).state
        self.feed(node, ev.LeadershipWon(now_s=self.now_s, revision=self.leader[1]))

    def feed(self, node: Node, event: ev.Event) -> None:
        if node.state is None:
            return
        outcome = machine.step(node.state, event, self.policy)
        node.state = outcome.state
        for action in outcome.actions:
            self._perform(node, action)

    def _leads(self, node: Node) -> bool:
        return self.leader is not None and self.leader[0] == node.agent_id

    def _perform(self, node: Node, action: Action) -> None:
        state = node.state
        match action:
            case WakeAt(time_s):
                node.wake += 1
                wake = node.wake

                def ring() -> None:
                    if node.state is not None and node.wake == wake:
                        self.feed(node, ev.TimePassed(now_s=self.now_s))

                self.after(max(0.0, time_s - self.now_s), node.agent_id, ring)
            case WriteGeneration() | WriteResult():
                self.after(self.latency_s(), "", lambda: self._write(node, state, action))
            case ProbeAgents(questions, sequence):
                for q in questions:
                    self._ask(node, node, q.agent_id, sequence, relayed=False)
                    if q.relay_agent_id:
                        self._ask(node, self.nodes[q.relay_agent_id], q.agent_id, sequence, relayed=True)
            case RemoveDeadAgent(agent_id, join_revision):
                target = self.nodes[agent_id]
                if not node.cut and target.revision == join_revision:
                    self.remove_agent(target)
            case RefuseMember():
                raise AssertionError("all fingerprints are equal")

    def _write(self, node: Node, state: machine.State | None, action: WriteGeneration | WriteResult) -> None:
        """A transaction at the store: fenced by leadership and by the previous number."""
        able = self._leads(node) and node.alive and not node.cut and node.state is not None
        if isinstance(action, WriteResult):
            if able and not self.is_over():
                self.result = action
                self.say(f"result: {action.outcome.value} {action.reason}")
            return
        number = max(self.records, default=0)
        generation = action.generation
        if able and action.expected_previous_number == number:
            assert generation.number > number, "I5: numbers only grow"
            self.records[generation.number] = generation
            members = " ".join(m.worker_id + ("*" if m.holder else "") for m in generation.members)
            self.say(
                f"generation {generation.number} {generation.kind.name} on {generation.base}: "
                f"{members} ({generation.reason})"
            )
            self.generation_written(generation)
            self.put("generation", ev.GenerationSeen, generation=generation)
        elif node.state is not None:
            refused = ev.GenerationWriteRefused(now_s=self.now_s, number=generation.number, why="fenced")
            self.after(self.latency_s(), node.agent_id, lambda: self._refused(node, refused))

    def _refused(self, node: Node, event: ev.GenerationWriteRefused) -> None:
        if node.state is not None and node.state.writing == event.number:
            self.feed(node, ev.GenerationWriteRefused(now_s=self.now_s, number=event.number, why=event.why))

    def _ask(self, node: Node, asker: Node, agent_id: str, sequence: int, *, relayed: bool) -> None:
        """The answer of `agent_id` to `asker`, told to `node`."""
        leadership = self.leader

        def answer(verdict: ProbeVerdict, workers: tuple[str, ...] | None) -> None:
            if node.state is not None and self.leader == leadership:
                self.feed(
                    node,
                    ev.ProbeAnswered(
                        now_s=self.now_s,
                        agent_id=agent_id,
                        sequence=sequence,
                        verdict=verdict,
                        relayed=relayed,
                        workers=workers,
                    ),
                )

        self.probe(node, asker, agent_id, answer)

    def probe(
        self,
        node: Node,
        asker: Node,
        agent_id: str,
        answer: Callable[[ProbeVerdict, tuple[str, ...] | None], None],
    ) -> None:
        """`asker` asks `agent_id` whether it lives; `node` receives the answer."""

        def arrive() -> None:
            target = self.nodes[agent_id]
            silent = target.cut or target.thaw_at_s > self.now_s or asker.cut or not asker.alive
            silent = silent or asker.thaw_at_s > self.now_s
            if silent:
                rest_s = self.policy.probe_window_s
                self.after(rest_s, node.agent_id, lambda: answer(ProbeVerdict.UNANSWERED, None))
            elif target.alive:
                self.after(
                    self.latency_s(),
                    node.agent_id,
                    lambda: answer(ProbeVerdict.ALIVE, self.workers_of(target)),
                )
            else:
                self.after(self.latency_s(), node.agent_id, lambda: answer(ProbeVerdict.REFUSED, None))

        self.after(self.latency_s(), "", arrive)


class _Asks:
    """The part of Probes that a LeaderWatch uses, at one simulated agent."""

    def __init__(self, store: Simulation, node: Node) -> None:
        self._store = store
        self._node = node

    def ask(self, question: Question, sequence: int) -> None:
        self._ask(self._node, question.agent_id, sequence, relayed=False)
        if question.relay_agent_id:
            relay = self._store.nodes[question.relay_address]
            self._ask(relay, question.agent_id, sequence, relayed=True)

    def _ask(self, asker: Node, agent_id: str, sequence: int, *, relayed: bool) -> None:
        def answer(verdict: ProbeVerdict, workers: tuple[str, ...] | None) -> None:
            assert self._node.watch is not None
            self._node.watch.took(
                ProbeResult(agent_id, sequence, relayed, verdict, workers), self._store.now_s
            )

        self._store.probe(self._node, asker, agent_id, answer)
