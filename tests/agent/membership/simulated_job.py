"""A job as it truly is, beside what leaders learn of it: a store, agents, workers that commit and switch.

Follows the worker's side of ARCHITECTURE.md ("What a step is") so that the leader's decisions can be judged
by what happens to the state. Asserts one history at every commit and I5, I6 and the ranks at every write.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from bagua_agent.membership import events as ev
from bagua_agent.membership.actions import (
    Action,
    Outcome,
    ProbeAgents,
    RemoveDeadAgent,
    WakeAt,
    WriteGeneration,
    WriteResult,
)
from bagua_agent.membership.machine import State, new_state, step, step_all
from bagua_agent.membership.policy import Policy
from bagua_agent.membership.view import Verdict
from bagua_contract.records import Generation, GenerationKind

POLICY = Policy()


@dataclass
class Worker:
    """steps, name: of the state it holds; name 0: none. current: record it is in."""

    worker_id: str
    agent_id: str
    slot: int
    alive: bool = True
    current: Generation | None = None
    pending: Generation | None = None
    steps: int = 0
    name: int = 0
    reported: int = 0
    revision: int = 0
    suspected: int = 0
    broken_in: int = 0

    def valid_steps(self, record: Generation) -> int:
        placement = record.placement_of(self.worker_id)
        assert placement is not None
        return self.steps if self.name >= placement.since_generation else 0


@dataclass
class Node:
    """silent: no network. storeless: etcd can't be reached, peers can."""

    agent_id: str
    slots: int
    alive: bool = True
    silent: bool = False
    storeless: bool = False
    leaving: bool = False
    revision: int = 0  # of its key; 0: it has none
    state: State = field(default_factory=lambda: new_state(""))
    cursor: int = 0
    wake_at_s: float | None = None

    @property
    def reaches_store(self) -> bool:
        return self.alive and not self.silent and not self.storeless


class SimulatedJob:
    def __init__(self, min_nodes: int, max_nodes: int) -> None:
        self.now_s = 0.0
        self.revision = 0
        self.log: list[tuple[type[ev.Event], dict[str, Any]]] = []
        self.keys: dict[str, tuple[type[ev.Event], dict[str, Any]]] = {}
        self.nodes: dict[str, Node] = {}
        self.workers: dict[str, Worker] = {}
        self.leader: tuple[str, int] | None = None
        self.generation: Generation | None = None
        self.records: dict[int, Generation] = {}
        self.max_nodes = max_nodes
        self.min_nodes = min_nodes
        self.committed = 0
        self.result: WriteResult | None = None
        self.probes: list[tuple[str, str, int, bool]] = []
        self.fresh_leader_under_empty = False
        self.scale(min_nodes, max_nodes)

    # -- the store
    def put(self, key: str, kind: type[ev.Event], **values: Any) -> None:
        self.revision += 1
        self.log.append((kind, values))
        self.keys[key] = (kind, values)

    def delete(self, key: str, kind: type[ev.Event], **values: Any) -> None:
        if self.keys.pop(key, None) is not None:
            self.revision += 1
            self.log.append((kind, values))

    def scale(self, min_nodes: int, max_nodes: int) -> None:
        self.min_nodes, self.max_nodes = min_nodes, max_nodes
        self.put("desired", ev.DesiredChanged, min_nodes=min_nodes, max_nodes=max_nodes)

    # -- agents
    def add_node(self, slots: int) -> None:
        agent_id = f"a{len(self.nodes)}"
        node = self.nodes[agent_id] = Node(agent_id, slots, state=new_state(agent_id))
        self.put_node(node)

    def put_node(self, node: Node) -> None:
        if node.revision == 0:
            node.revision = self.revision + 1
        self.put(
            f"agents/{node.agent_id}",
            ev.AgentSeen,
            agent_id=node.agent_id,
            node_name=f"host-{node.agent_id}",
            slots=node.slots,
            topology="",
            leaving=node.leaving,
            control_address=f"{node.agent_id}:1",
            join_revision=node.revision,
        )

    def expire(self, node: Node) -> None:
        """Its lease ends, or somebody removed its keys."""
        if self.leader is not None and self.leader[0] == node.agent_id:
            self.leader = None
        node.revision = 0
        self.delete(f"agents/{node.agent_id}", ev.AgentGone, agent_id=node.agent_id)
        for worker in self.of(node):
            worker.revision = 0
            self.delete(f"members/{worker.worker_id}", ev.MemberGone, worker_id=worker.worker_id)
            self.delete(f"suspicions/{worker.worker_id}", ev.SuspicionCleared, worker_id=worker.worker_id)

    def put_again(self, node: Node) -> None:
        if not node.reaches_store:
            return
        for worker in self.of(node):
            if not worker.alive and worker.revision:
                self.end(worker, well=False)
        if node.revision == 0:
            self.put_node(node)
            for worker in self.of(node):
                if worker.alive:
                    self.put_worker(worker)

    def elect(self, node: Node, *, fresh: bool) -> None:
        assert self.leader is None
        self.revision += 1
        self.leader = (node.agent_id, self.revision)
        if fresh:
            if self.generation is not None and not self.generation.members:
                self.fresh_leader_under_empty = True
            self.step_down(node)
            node.state, node.cursor = new_state(node.agent_id), len(self.log)
            self.probes = [p for p in self.probes if p[0] != node.agent_id]
            picture = [k(now_s=self.now_s, **v) for k, v in self.keys.values()]
            node.state = step_all(node.state, picture, POLICY).state
        else:
            self.step_down(node)
        self.feed(node, ev.LeadershipWon(now_s=self.now_s, revision=self.revision))

    def step_down(self, node: Node) -> None:
        if node.state.leading:
            self.feed(node, ev.LeadershipLost(now_s=self.now_s))

    def deliver(self, node: Node, most: int = 10**9) -> None:
        while node.reaches_store and node.cursor < len(self.log) and most > 0:
            kind, values = self.log[node.cursor]
            node.cursor += 1
            most -= 1
            self.feed(node, kind(now_s=self.now_s, **values))

    def feed(self, node: Node, event: ev.Event) -> None:
        was_pending = self._believes_pending(node)
        outcome = step(node.state, event, POLICY)
        assert outcome.reason
        assert outcome.state.leading or not outcome.actions, "an agent that does not lead acted"
        node.state = outcome.state
        for action in outcome.actions:
            self.perform(node, action, was_pending)

    def _believes_pending(self, node: Node) -> bool:
        record = node.state.view.generation
        return (
            record is not None
            and record.kind is GenerationKind.PLANNED
            and max(record.base, node.state.view.committed_generation) < record.number
            and record.base > 0
        )

    def perform(self, node: Node, action: Action, was_pending: bool) -> None:
        leads = self.leader is not None and self.leader[0] == node.agent_id and node.reaches_store
        match action:
            case WriteGeneration(generation, previous):
                number = 0 if self.generation is None else self.generation.number
                if leads and previous == number and self.result is None:
                    self.accept(generation)
                else:
                    self.feed(
                        node,
                        ev.GenerationWriteRefused(now_s=self.now_s, number=generation.number, why="fenced"),
                    )
            case WriteResult():
                if leads and self.result is None:
                    self.result = action
                    self.put("result", ev.ResultSeen)
                else:
                    self.feed(node, ev.ResultWriteRefused(now_s=self.now_s, why="fenced"))
            case ProbeAgents(questions, sequence):
                for q in questions:
                    self.probes.append((node.agent_id, q.agent_id, sequence, False))
                    if q.relay_agent_id:
                        self.probes.append((node.agent_id, q.agent_id, sequence, True))
            case RemoveDeadAgent(agent_id, join_revision):
                if leads and self.nodes[agent_id].revision == join_revision:
                    self.expire(self.nodes[agent_id])
            case WakeAt(time_s):
                assert time_s > self.now_s, "a wake in the past would spin"
                node.wake_at_s = time_s

    def accept(self, generation: Generation) -> None:
        assert self.result is None
        previous = self.generation
        assert generation.number > (0 if previous is None else previous.number), "I5"
        assert generation.number not in self.records, "I5"
        if generation.members:
            self._check_ranks(generation)
        stay = {m.agent_id for m in generation.members if not self.nodes[m.agent_id].leaving}
        seen_most = max(v["max_nodes"] for k, v in self.log if k is ev.DesiredChanged)
        assert len(stay) <= seen_most, "more nodes than the most"
        if self.committed and generation.members:
            best = max(self.workers[m.worker_id].valid_steps(generation) for m in generation.members)
            assert best == self.committed, f"I6: {best} of {self.committed} steps in {generation.number}"
        self.generation = self.records[generation.number] = generation
        self.put("generation", ev.GenerationSeen, generation=generation)

    def _check_ranks(self, generation: Generation) -> None:
        nodes: list[str] = []
        for m in generation.members:
            if m.agent_id not in nodes:
                nodes.append(m.agent_id)
            assert m.node_rank == nodes.index(m.agent_id) == len(nodes) - 1, "a node's ranks are contiguous"
            assert m.local_rank == sum(p.agent_id == m.agent_id for p in generation.members[: m.global_rank])
        if generation.base:
            assert generation.members[0].holder, "rank 0 is a holder"

    def answer(self, index: int) -> None:
        asker_id, target_id, sequence, relayed = self.probes.pop(index)
        asker, target = self.nodes[asker_id], self.nodes[target_id]
        if not asker.alive:
            return
        if asker.silent or target.silent:
            verdict = Verdict.UNANSWERED
        else:
            verdict = Verdict.ALIVE if target.alive else Verdict.REFUSED
        answer = ev.ProbeAnswered(
            now_s=self.now_s,
            agent_id=target_id,
            sequence=sequence,
            verdict=verdict,
            relayed=relayed,
            workers=tuple(w.worker_id for w in self.of(target) if w.alive),
        )
        self.feed(asker, answer)

    # -- workers
    def of(self, node: Node) -> list[Worker]:
        return [w for w in self.workers.values() if w.agent_id == node.agent_id]

    def spawn(self, node: Node) -> None:
        taken = {w.slot for w in self.of(node) if w.alive}
        free = [s for s in range(node.slots) if s not in taken]
        if free and node.reaches_store and not node.leaving:
            worker = Worker(f"w{len(self.workers)}", node.agent_id, free[0])
            self.workers[worker.worker_id] = worker
            self.put_worker(worker)

    def put_worker(self, worker: Worker) -> None:
        if worker.revision == 0:
            worker.revision = self.revision + 1
        self.put(
            f"members/{worker.worker_id}",
            ev.MemberReady,
            worker_id=worker.worker_id,
            agent_id=worker.agent_id,
            slot=worker.slot,
            store_address=f"{worker.agent_id}:2",
            fingerprint={"model": "m"},
            committed_generation=worker.reported,
            join_revision=worker.revision,
        )

    def end(self, worker: Worker, *, well: bool) -> None:
        """The process ended; its agent takes the key away."""
        worker.alive = False
        worker_id = worker.worker_id
        if not self.nodes[worker.agent_id].reaches_store:
            return
        if well:
            self.put(f"finished/{worker_id}", ev.WorkerFinished, worker_id=worker_id)
        else:
            self.put(
                f"failures/{worker_id}",
                ev.FailureRecorded,
                worker_id=worker_id,
                node_name=worker.agent_id,
                step=worker.steps,
                in_step=False,
                script_failure=False,
                summary="killed by SIGKILL",
                order=self.revision + 1,
            )
        worker.revision = 0
        self.delete(f"members/{worker_id}", ev.MemberGone, worker_id=worker_id)
        self.delete(f"suspicions/{worker_id}", ev.SuspicionCleared, worker_id=worker_id)

    def kill_node(self, node: Node) -> None:
        node.alive = False
        for worker in self.of(node):
            worker.alive = False

    def look(self, worker: Worker) -> None:
        """The worker learns of the newest record."""
        record, node = self.generation, self.nodes[worker.agent_id]
        if record is None or not worker.alive or not node.reaches_store:
            return
        current = 0 if worker.current is None else worker.current.number
        inside = record.placement_of(worker.worker_id) is not None
        if record.number > current:
            if record.kind is GenerationKind.LOSS or record.base == 0:
                self._enter(worker, record)
            else:
                if worker.current is not None and record.base > current:
                    # Planned upon a generation that this worker never saw, so that one left it out: every
                    # member of a base has taken it.
                    worker.current, worker.steps, worker.name = None, 0, 0
                worker.pending = record
        if node.leaving and worker.current is None and not inside:
            self.end(worker, well=True)

    def _enter(self, worker: Worker, record: Generation) -> None:
        worker.pending = None
        if record.placement_of(worker.worker_id) is not None:
            worker.current = record
            return
        worker.current = None
        if record.members:
            worker.steps = worker.name = 0  # the job goes on elsewhere: what it holds is old
        if self.nodes[worker.agent_id].leaving:
            self.end(worker, well=True)

    def members(self, record: Generation) -> list[Worker]:
        return [self.workers[m.worker_id] for m in record.members]

    def works(self, record: Generation) -> bool:
        return bool(record.members) and all(
            w.alive
            and w.current is record
            and w.broken_in != record.number
            and not self.nodes[w.agent_id].silent
            for w in self.members(record)
        )

    def commit(self, record: Generation) -> None:
        if not self.works(record):
            return
        members = self.members(record)
        steps = max(w.valid_steps(record) for w in members)
        assert steps == self.committed, f"one history: {steps} of {self.committed} in {record}"
        self.committed += 1
        for worker in members:
            worker.steps, worker.name = self.committed, record.number
        pendings = {w.pending.number if w.pending is not None else 0 for w in members}
        if len(pendings) == 1 and (number := pendings.pop()) > record.number:
            pending = self.records[number]
            joining = [w for w in self.members(pending) if w not in members]
            if all(w.alive and w.pending is pending and w.current is None for w in joining):
                for worker in members + joining:
                    self._enter(worker, pending)

    def report(self, worker: Worker) -> None:
        reaches = self.nodes[worker.agent_id].reaches_store
        if worker.alive and reaches and worker.revision and worker.name > worker.reported:
            worker.reported = worker.name
            self.put_worker(worker)

    def suspect(self, worker: Worker, *, broken: bool) -> None:
        record = worker.current
        if record is None or not worker.alive or self.works(record):
            return
        if not self.nodes[worker.agent_id].reaches_store or worker.revision == 0:
            return
        worker.suspected += 1
        if broken:
            worker.broken_in = record.number
        self.put(
            f"suspicions/{worker.worker_id}",
            ev.SuspicionRaised,
            worker_id=worker.worker_id,
            generation=record.number,
            broken=broken,
            hosts=(),
            sequence=worker.suspected,
        )

    @property
    def failed(self) -> bool:
        return self.result is not None and self.result.outcome is Outcome.FAILED
