"""A job as it truly is, beside what leaders learn of it: a store, agents that die or are cut off, workers.

Asserts at every write I5, I6, the ranks, the most nodes, the allowed sizes and that no two planned generations are
under way.
"""

from __future__ import annotations

from typing import Any

from simulated_workers import Node, SimulatedWorkers, Worker

from bagua_agent.base.sizes import ANY_SIZE, SizePolicy
from bagua_agent.membership import events as ev
from bagua_agent.membership.actions import (
    Action,
    ProbeAgents,
    RemoveDeadAgent,
    ResultOutcome,
    WakeAt,
    WriteGeneration,
    WriteHangOrder,
    WriteReplicas,
    WriteResult,
)
from bagua_agent.membership.job_condition import job_condition
from bagua_agent.membership.policy import Policy
from bagua_agent.membership.state_machine.machine import State, new_state, step, step_all
from bagua_agent.membership.view import (
    AgentView,
    DepartureView,
    FailureView,
    MemberView,
    ProbeVerdict,
    SuspicionView,
)
from bagua_contract.records import Generation, GenerationKind, Stage, SuspicionKind

POLICY = Policy()


class SimulatedJob(SimulatedWorkers):
    def __init__(
        self,
        min_nodes: int,
        max_nodes: int,
        *,
        asks: bool = False,
        has_checkpoints: bool = False,
        sizes: SizePolicy = ANY_SIZE,
        replica_size: int = 1,
    ) -> None:
        """asks: scripts ask for ranks before their loops."""
        super().__init__()
        self.asks = asks
        self.has_checkpoints = has_checkpoints
        self.now_s = 0.0
        self.revision = 0
        self.log: list[tuple[type[ev.Event], dict[str, Any]]] = []
        self.keys: dict[str, tuple[type[ev.Event], dict[str, Any]]] = {}
        self.leader: tuple[str, int] | None = None
        self.max_nodes = max_nodes
        self.min_nodes = min_nodes
        self.result: WriteResult | None = None
        self.probes: list[tuple[str, str, int, bool]] = []
        self.fresh_leader_under_empty = False
        self.sizes = sizes.sizes
        self.replica_size = replica_size
        self.put("spec", ev.ModeSeen, restarts=False, size_policy=sizes, replica_size=replica_size)
        self.scale(min_nodes, max_nodes)

    # -- the store
    def put(self, key: str, kind: type[ev.Event], /, **values: Any) -> None:
        self.revision += 1
        self.log.append((kind, values))
        self.keys[key] = (kind, values)

    def delete(self, key: str, kind: type[ev.Event], /, **values: Any) -> None:
        if self.keys.pop(key, None) is not None:
            self.revision += 1
            self.log.append((kind, values))

    def scale(self, min_nodes: int, max_nodes: int) -> None:
        self.min_nodes, self.max_nodes = min_nodes, max_nodes
        self.put("desired", ev.DesiredChanged, min_nodes=min_nodes, max_nodes=max_nodes)

    # -- agents
    def new_state(self, agent_id: str) -> State:
        return new_state(agent_id, has_checkpoints=self.has_checkpoints, replica_size=self.replica_size)

    def add_node(self, slots: int) -> None:
        agent_id = f"a{len(self.nodes)}"
        node = self.nodes[agent_id] = Node(agent_id, slots, state=self.new_state(agent_id))
        self.put_node(node)

    def put_node(self, node: Node) -> None:
        if node.revision == 0:
            node.revision = self.revision + 1
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

    def expire(self, node: Node) -> None:
        """Its lease ends, or its keys were removed."""
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
            node.state, node.cursor = self.new_state(node.agent_id), len(self.log)
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
        outcome = step(node.state, event, POLICY)
        assert outcome.reason
        assert outcome.state.leading or not outcome.actions, "an agent that does not lead acted"
        node.state = outcome.state
        for action in outcome.actions:
            self.perform(node, action)

    def perform(self, node: Node, action: Action) -> None:
        leads = self.leader is not None and self.leader[0] == node.agent_id and node.reaches_store
        match action:
            case WriteGeneration(generation, previous):
                if generation.kind is GenerationKind.PLANNED:
                    seen = job_condition(node.state.view, node.state.evidence, self.now_s, POLICY)
                    given_up = seen.newcomers_gone or seen.unbuilt
                    assert not seen.pending or given_up, "two planned ones at a time"
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
            case WriteHangOrder(order):
                if leads:
                    self.put("hang", ev.HangOrderSeen, order=order)
            case WriteReplicas():
                if leads:
                    self.write_replicas(action)
            case WakeAt(time_s):
                assert time_s > self.now_s, "a wake in the past would spin"
                node.wake_at_s = time_s

    def write_replicas(self, action: WriteReplicas) -> None:
        raise AssertionError(f"a job without replicas: {action}")

    def accept(self, generation: Generation) -> None:
        assert self.result is None
        previous = self.generation
        assert generation.number > (0 if previous is None else previous.number), "I5"
        assert generation.number not in self.records, "I5"
        if generation.members:
            self._check_ranks(generation)
        if previous is not None and previous.is_gathering and not generation.is_gathering:
            was, now = ([m.worker_id for m in g.members] for g in (previous, generation))
            assert was == now, "the ranks of the first generation are those of its gathering"
        stay = self.staying(generation)
        seen_most = max(v["max_nodes"] for k, v in self.log if k is ev.DesiredChanged)
        assert len(stay) <= seen_most, "more nodes than the most"
        if self.sizes and generation.members:
            # a node that leaves and one that is to get its state are two
            hands_over = any(self.nodes[m.agent_id].leaving for m in generation.members)
            is_exempt = (
                hands_over and max((s for s in self.sizes if s <= generation.node_count), default=1) == 1
            )
            assert generation.node_count in self.sizes or is_exempt, (
                f"{generation.node_count} nodes, allowed: {self.sizes}"
            )
        if generation.number > 1 and generation.base == 0 and self.committed:
            # Begun anew: allowed only once no worker can come back with the steps.
            assert not self.holders(), f"L1: begun anew beside {self.holders()}"
            self.committed = 0
        if self.committed and generation.members:
            best = max(self.workers[m.worker_id].valid_steps(generation) for m in generation.members)
            assert best == self.committed, f"I6: {best} of {self.committed} steps in {generation.number}"
        self.generation = self.records[generation.number] = generation
        self.put("generation", ev.GenerationSeen, generation=generation)

    def staying(self, generation: Generation) -> set[str]:
        """Nodes of `generation` that do not leave behind it."""
        return {m.agent_id for m in generation.members if not self.nodes[m.agent_id].leaving}

    def holders(self) -> list[str]:
        """Workers that live and have all committed steps, unless a later record did without them."""
        return [
            w.worker_id
            for w in self.workers.values()
            if w.alive and w.name and w.steps == self.committed and not self.left_out(w)
        ]

    def left_out(self, worker: Worker) -> bool:
        """A record after its last commit did without it. That may never have been in force, so it may still
        have the state; but its leader can't know, and to wait in vain is better than two histories."""
        later = [g for g in self.records.values() if g.number > worker.name and g.members]
        places = [g.placement_of(worker.worker_id) for g in later]
        return any(p is None or p.since_generation > worker.name for p in places)

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
            verdict = ProbeVerdict.UNANSWERED
        else:
            verdict = ProbeVerdict.ALIVE if target.alive else ProbeVerdict.REFUSED
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
    @property
    def first_stage(self) -> Stage:
        return Stage.WAITING if self.asks else Stage.LOOP

    def spawn(self, node: Node) -> None:
        taken = {w.slot for w in self.of(node) if w.alive}
        free = [s for s in range(node.slots) if s not in taken]
        if free and node.reaches_store and not node.leaving:
            worker = Worker(f"w{len(self.workers)}", node.agent_id, free[0])
            worker.stage = self.first_stage
            self.workers[worker.worker_id] = worker
            self.put_worker(worker)

    def put_worker(self, worker: Worker) -> None:
        if worker.revision == 0:
            worker.revision = self.revision + 1
        self.put(
            f"members/{worker.worker_id}",
            ev.MemberReady,
            member=MemberView(
                worker_id=worker.worker_id,
                agent_id=worker.agent_id,
                slot=worker.slot,
                store_address=f"{worker.agent_id}:2",
                fingerprint={"model": "m"},
                committed_generation=worker.reported,
                join_revision=worker.revision,
                stage=worker.stage,
            ),
        )

    def end(self, worker: Worker, *, well: bool) -> None:
        """The process ended; its agent takes the key away."""
        worker.alive = False
        worker_id = worker.worker_id
        if not self.nodes[worker.agent_id].reaches_store:
            return
        if well and (self.nodes[worker.agent_id].leaving or worker.leaves):
            listing = [g for g in self.records.values() if g.placement_of(worker_id) is not None]
            departure = DepartureView(
                worker_id,
                worker.agent_id,
                listing[-1].number if listing else 0,
                listing[-1].world_size if listing else 0,
            )
            self.put(f"departed/{worker_id}", ev.WorkerDeparted, departure=departure)
        elif well:
            self.put(
                f"finished/{worker_id}", ev.WorkerFinished, worker_id=worker_id, agent_id=worker.agent_id
            )
        else:
            self.put(
                f"failures/{worker_id}",
                ev.FailureRecorded,
                failure=FailureView(
                    worker_id=worker_id,
                    node_name=worker.agent_id,
                    step=worker.steps,
                    in_step=False,
                    script_failure=False,
                    summary="killed by SIGKILL",
                    order=self.revision + 1,
                ),
            )
        worker.revision = 0
        self.delete(f"members/{worker_id}", ev.MemberGone, worker_id=worker_id)
        self.delete(f"suspicions/{worker_id}", ev.SuspicionCleared, worker_id=worker_id)

    def report(self, worker: Worker) -> None:
        reaches = self.nodes[worker.agent_id].reaches_store
        if worker.alive and reaches and worker.revision and worker.name > worker.reported:
            worker.reported = worker.name
            self.put_worker(worker)

    def suspect(self, worker: Worker, *, broken: bool) -> None:
        record = worker.current
        if record is None or not worker.alive or self.works(record):
            return
        if record.is_gathering and self.is_whole(record):
            return
        if not self.nodes[worker.agent_id].reaches_store or worker.revision == 0:
            return
        worker.suspected += 1
        if broken:
            worker.broken_in = record.number
        self.put(
            f"suspicions/{worker.worker_id}",
            ev.SuspicionRaised,
            suspicion=SuspicionView(
                worker_id=worker.worker_id,
                generation=record.number,
                kind=SuspicionKind.BROKEN if broken else SuspicionKind.STALLED,
                hosts=self.whom_it_blames(worker, record),
                sequence=worker.suspected,
            ),
        )

    def whom_it_blames(self, worker: Worker, record: Generation) -> tuple[str, ...]:
        """The workers that it can't reach or hear; the others blame the one of the two that gave up first."""
        cut = self.cut_in(record)
        own = [b if a == worker.agent_id else a for a, b in cut if worker.agent_id in (a, b)]
        blamed = own or [a for a, _ in cut[:1]]
        return tuple(f"{agent_id}:2" for agent_id in blamed)

    def report_unbuilt(self, worker: Worker) -> None:
        """Its pending record can't be built, for it or a peer can't be reached."""
        record = worker.pending
        if record is None or not worker.alive or worker.unbuilt >= record.number or not self.cut_in(record):
            return
        if not self.nodes[worker.agent_id].reaches_store or worker.revision == 0:
            return
        worker.unbuilt = record.number
        worker.suspected += 1
        self.put(
            f"suspicions/{worker.worker_id}",
            ev.SuspicionRaised,
            suspicion=SuspicionView(
                worker_id=worker.worker_id,
                generation=record.number,
                kind=SuspicionKind.UNBUILT,
                hosts=(),
                sequence=worker.suspected,
            ),
        )

    # -- everything works as long as nothing hinders it

    def settle(self, passed_s: float = 0.5) -> None:
        """Some time passes in which every process does what it should."""
        self.now_s += passed_s
        for node in list(self.nodes.values()):
            if not node.alive and node.revision:
                self.expire(node)
            self.put_again(node)
            if node.alive:
                for _ in range(node.slots):
                    self.spawn(node)
        able = [n for n in self.nodes.values() if n.reaches_store]
        if self.leader is None or not self.nodes[self.leader[0]].reaches_store:
            self.leader = None
            if able:
                self.elect(able[0], fresh=False)
        for worker in list(self.workers.values()):
            self.look(worker)
        for record in list(self.records.values()):
            self.commit(record)
        for worker in list(self.workers.values()):
            self.report(worker)
            self.report_unbuilt(worker)
            self.suspect(worker, broken=True)
        for node in able:
            self.deliver(node)
        while self.probes:
            self.answer(0)
        for node in able:
            self.deliver(node)
            self.feed(node, ev.TimePassed(now_s=self.now_s))

    @property
    def failed(self) -> bool:
        return self.result is not None and self.result.outcome is ResultOutcome.FAILED
