"""Whole jobs in virtual time: workers that reduce, commit, heal and end, under seeded faults.

Owns what a worker does between two records, with the real decisions: following, switch_pair, heal_plan and
commit_history; the leader is the real machine (simulated_store.py). No torch, no processes, no waiting. The
same seed gives the same job, and its `story` tells it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from simulated_store import Node, Simulation

from bagua_agent.membership import events as ev
from bagua_agent.membership.actions import ResultOutcome
from bagua_agent.membership.view import (
    DepartureView,
    FailureView,
    MemberView,
    SuspicionView,
)
from bagua_contract.records import Generation, StateName, SuspicionKind
from bagua_core.elastic.heal import heal_plan
from bagua_core.elastic.heal.heal_plan import HealPlan
from bagua_core.elastic.membership import switch_pair
from bagua_core.elastic.membership.following import FollowingSituation, Move, decide, is_superseded
from bagua_core.elastic.state.commit_history import Entry, History, Line

# What made a state: whose initial parameters, then every commit, ("step", generation, number) or
# ("end", generation).
Chain = tuple[tuple[str | int, ...], ...]

STALL_S = 0.25


@dataclass
class Worker:
    """current: the generation it is in, or is about to be. token: counts what it began, so that late news of
    old things is told apart. round: collectives of `current` it contributed to. counted: its chain counts.
    """

    worker_id: str
    node: Node
    slot: int
    chain: Chain
    alive: bool = True
    revision: int = 0
    current: Generation | None = None
    broken: bool = False
    agreed: Generation | None = None
    built: Generation | None = None
    floor: int = 0
    token: int = 0
    round: int = 0
    waiting_for_news: bool = False
    in_collective: bool = False
    counted: bool = True
    history: History = field(default_factory=History)
    plan: HealPlan | None = None
    reported: int = 0
    suspected: int = 0
    suspicion: tuple[int, bool] | None = None  # the last one, which its agent keeps in the store
    ended: str = ""  # what its agent records: finished, departed or failures
    previous: Generation | None = None  # to fall back to while `current` is being entered
    taking_part: bool = False  # `current` is entered
    then: Callable[[dict[int, Any]], None] | None = None  # what the collective under way is for
    copied: bool = False  # the copy beside the step has arrived
    held: Callable[[], None] | None = None  # the step is reduced and waits for that copy
    swap_in: Callable[[Callable[[], None]], None] = lambda then: then()
    is_writing: bool = False
    dies_between_lines: bool = False  # it is killed when it next writes several lines, after the first
    confirmed: bool = False  # it completed the second collective of the end

    @property
    def name(self) -> StateName:
        commits = self.chain[1:]
        if not commits or not self.counted:
            return StateName()
        steps = [c for c in commits if c[0] == "step"]
        operations = 0
        while commits[-1 - operations][0] == "end":
            operations += 1
            if operations == len(commits):
                break
        return StateName(int(commits[-1][1]), len(steps), operations)


class SimulatedJob(Simulation):
    def __init__(self, seed: int, steps: int, nodes: int, slots: int, min_nodes: int) -> None:
        super().__init__(seed)
        self.steps = steps
        self.workers: dict[str, Worker] = {}
        self.rounds: dict[tuple[int, int], dict[int, Any]] = {}
        self.gone_from: dict[int, set[int]] = {}  # generation -> ranks whose side of it is closed
        self.ledger: dict[tuple[int, int, int], Entry] = {}
        self.states: dict[StateName, Chain] = {}
        self.faults: dict[str, int] = {}
        self.min_nodes = min_nodes
        self.put("desired", ev.DesiredChanged, min_nodes=min_nodes, max_nodes=8)
        for _ in range(nodes):
            self.add_node(slots)
        self.after(self.latency_s(0.0, 0.1), "", self.elect)

    # -- nodes and workers come and go

    def add_node(self, slots: int) -> Node:
        node = Node(f"n{len(self.nodes)}", slots, seen=len(self.log), newest=self.generation)
        self.nodes[node.agent_id] = node
        node.closing = "closing" in self.keys
        self.put_agent(node)
        for slot in range(slots):
            self.after(self.latency_s(0.2, 1.0), node.agent_id, lambda slot=slot: self.spawn(node, slot))  # type: ignore[misc]
        return node

    def spawn(self, node: Node, slot: int) -> None:
        if node.leaving or node.closing:
            return
        worker_id = f"w{len(self.workers)}"
        worker = Worker(worker_id, node, slot, ((worker_id,),))
        self.workers[worker_id] = worker
        self.boundary(worker)

    def of(self, node: Node) -> list[Worker]:
        return [w for w in self.workers.values() if w.node is node and w.alive]

    def workers_of(self, node: Node) -> tuple[str, ...]:
        return tuple(w.worker_id for w in self.of(node))

    def put_member(self, w: Worker) -> None:
        if w.node.cut or w.node.revision == 0 or not w.alive:
            return
        w.revision = w.revision or len(self.log) + 1
        self.put(
            f"members/{w.worker_id}",
            ev.MemberReady,
            member=MemberView(
                worker_id=w.worker_id,
                agent_id=w.node.agent_id,
                slot=w.slot,
                store_address=f"{w.node.agent_id}:2",
                fingerprint={"model": "m"},
                committed_generation=w.reported,
                join_revision=w.revision,
            ),
        )

    def remove_member(self, w: Worker) -> None:
        w.revision = 0
        self.delete(f"members/{w.worker_id}", ev.MemberGone, worker_id=w.worker_id)
        self.delete(f"suspicions/{w.worker_id}", ev.SuspicionCleared, worker_id=w.worker_id)

    def keys_removed(self, node: Node) -> None:
        for w in self.workers.values():
            if w.node is node:
                self.remove_member(w)

    def keys_back(self, node: Node) -> None:
        """The agent puts what it still stands for, and tells how workers ended meanwhile."""
        if node.revision == 0:
            self.put_agent(node)
        for w in self.workers.values():
            if w.node is node and not w.alive:
                self._tell_end(w)
            elif w.node is node and (w.reported or w.waiting_for_news or w.current is not None):
                self.put_member(w)
                if w.suspicion is not None:
                    self.suspect(w, w.suspicion[0], broken=w.suspicion[1])

    def suspect(self, w: Worker, generation: int, *, broken: bool) -> None:
        w.suspicion = (generation, broken)
        if w.node.cut or w.revision == 0:
            return  # its agent tells as soon as it can
        w.suspected += 1
        self.put(
            f"suspicions/{w.worker_id}",
            ev.SuspicionRaised,
            suspicion=SuspicionView(
                worker_id=w.worker_id,
                generation=generation,
                kind=SuspicionKind.BROKEN if broken else SuspicionKind.STALLED,
                hosts=(),
                sequence=w.suspected,
            ),
        )
        self.suspect_leader(w.node)

    def end(self, w: Worker, *, well: bool, trained: bool = False) -> None:
        """The process is gone; its sockets close. trained: it told its agent that training is done."""
        w.alive = False
        if w.node.leaving and not trained:
            w.ended = "departed"
        else:
            w.ended = "finished" if well else "failures"
        w.token += 1
        self.process_gone(w)
        self.after(self.latency_s(), w.node.agent_id, lambda: self._tell_end(w))
        if not well:
            self.after(self.latency_s(0.3, 1.0), w.node.agent_id, lambda: self.spawn(w.node, w.slot))

    def _tell_end(self, w: Worker) -> None:
        if w.node.cut or f"{w.ended}/{w.worker_id}" in self.keys:
            return
        if w.ended == "finished":
            self.put(f"finished/{w.worker_id}", ev.WorkerFinished, worker_id=w.worker_id)
        elif w.ended == "departed":
            listed = [g for g in self.records.values() if g.placement_of(w.worker_id) is not None]
            newest = max(listed, key=lambda g: g.number, default=None)
            departure = DepartureView(
                w.worker_id,
                w.node.agent_id,
                newest.number if newest is not None else 0,
                newest.world_size if newest is not None else 0,
                w.name,
            )
            self.put(f"departed/{w.worker_id}", ev.WorkerDeparted, departure=departure)
        else:
            self.put(
                f"failures/{w.worker_id}",
                ev.FailureRecorded,
                failure=FailureView(
                    worker_id=w.worker_id,
                    node_name=w.node.agent_id,
                    step=w.name.step,
                    in_step=False,
                    script_failure=False,
                    summary="killed by SIGKILL",
                    order=len(self.log) + 1,
                ),
            )
        self.remove_member(w)

    # -- faults

    def kill_worker(self, w: Worker) -> None:
        if w.alive and w.node.alive:
            self.say(f"{w.worker_id} is killed")
            self.count("kill")
            self.end(w, well=False)

    def kill_node(self, node: Node) -> None:
        self.say(f"{node.agent_id} is killed")
        self.count("node killed")
        node.alive = False
        node.state = None
        for w in self.of(node):
            w.alive = False
            w.token += 1
            self.process_gone(w)
        self.lapse(node)

    def cut_node(self, node: Node, for_s: float) -> None:
        self.say(f"{node.agent_id} is cut off for {for_s:.2f} s")
        self.count("cut")
        node.cut = True
        self.lapse(node)

        def heal() -> None:
            self.say(f"{node.agent_id} is back")
            node.cut = False
            node.lease += 1
            self.resync(node)
            for w in self.of(node):
                if w.in_collective and w.current is not None and not self.is_within(w.current, node):
                    self.fail(w, w.token)  # what was under way with others did not survive
                for number, gone in self.gone_from.items():
                    placement = self.records[number].placement_of(w.worker_id)
                    if placement is not None and placement.global_rank in gone:
                        self.tell_peers(w, self.records[number])

        self.after(for_s, node.agent_id, heal)

    def freeze_node(self, node: Node, for_s: float) -> None:
        self.say(f"{node.agent_id} freezes for {for_s:.2f} s")
        self.count("freeze")
        node.thaw_at_s = self.now_s + for_s
        self.lapse(node)

        def thaw() -> None:
            node.lease += 1
            if node.revision == 0:
                self.put_again(node)

        self.after(for_s, node.agent_id, thaw)

    def leave(self, node: Node) -> None:
        if not node.cut and node.revision and not node.leaving:
            self.say(f"{node.agent_id} is asked to leave")
            self.count("leave")
            node.leaving = True
            self.put_agent(node)
            self.news(node)

    @staticmethod
    def is_within(generation: Generation, node: Node) -> bool:
        """Its collectives need no network."""
        return all(m.agent_id == node.agent_id for m in generation.members)

    def count(self, what: str) -> None:
        self.faults[what] = self.faults.get(what, 0) + 1

    # -- what a worker does

    def news(self, node: Node) -> None:
        newest = node.newest
        for w in self.of(node):
            if w.waiting_for_news:
                self.boundary(w)
            elif node.closing and w.current is not None and not w.taking_part:
                self.fail(w, w.token)  # the others have ended
            elif newest is not None and w.current is not None:
                if is_superseded(w.current, newest, newcomer=w.previous is None and not w.taking_part):
                    self.fail(w, w.token)
                elif newest.number > w.current.number and newest.placement_of(w.worker_id):
                    delay_s = self.latency_s(0.01, 0.1)
                    self.after(delay_s, node.agent_id, lambda w=w: self._built(w, newest))  # type: ignore[misc]

    def _built(self, w: Worker, generation: Generation) -> None:
        if w.alive and all(self.workers[m.worker_id].alive for m in generation.members):
            w.built = generation

    def boundary(self, w: Worker) -> None:
        """Decide the worker's next move, and begin it."""
        w.waiting_for_news = w.in_collective = False
        w.token += 1
        if not w.alive:
            return
        node = w.node
        if node.closing and w.counted and w.name.step == self.steps:
            self.say(f"{w.worker_id} ends: the end is confirmed elsewhere")
            self.end(w, well=True, trained=True)
            return
        decision = decide(
            FollowingSituation(
                w.worker_id, w.current, w.broken, w.agreed, node.newest, w.floor, node.leaving, node.closing
            )
        )
        match decision.move:
            case Move.STAY:
                self.next_collective(w)
            case Move.ENTER:
                assert decision.generation is not None
                self.enter(w, decision.generation)
            case Move.STEP_OUT:
                assert decision.generation is not None
                self.step_out(w, decision.generation)
            case Move.END:
                self.say(f"{w.worker_id} ends: {decision.reason}")
                self.end(w, well=True)
            case Move.REPORT_MISSED:
                assert decision.generation is not None
                self.suspect(w, decision.generation.base, broken=True)
                w.waiting_for_news = True
            case Move.WAIT:
                w.waiting_for_news = True
                if w.current is None and w.revision == 0:
                    self.put_member(w)

    def step_out(self, w: Worker, generation: Generation) -> None:
        assert w.current is not None
        self.close_side(w, w.current)
        w.current, w.agreed, w.built, w.broken = None, None, None, False
        if generation.members:
            self.say(f"{w.worker_id} steps out for {generation.number} and forgets")
            w.counted, w.history, w.reported = False, History(), 0
            self.remove_member(w)
        # An empty generation has no steps, so a worker that steps aside for it keeps the state.
        self.boundary(w)

    def enter(self, w: Worker, generation: Generation) -> None:
        if w.current is not None:
            self.close_side(w, w.current)
        w.previous, w.current, w.taking_part = w.current, generation, False
        w.agreed, w.built, w.round, w.broken, w.copied, w.held = None, None, 0, False, False, None
        placement = generation.placement_of(w.worker_id)
        assert placement is not None
        if heal_plan.counted_name(w.name, placement.since_generation).is_none and len(w.chain) > 1:
            w.counted, w.history = False, History()
        entered_with = (w.name, w.chain, w.history, w.counted)

        def exchanged(values: dict[int, Any]) -> None:
            plan = w.plan = self.plan_of(generation)
            lines = w.history.entered(w.worker_id, self.roster(generation))
            self.write(w, lines, lambda: self.take_part(w, generation, values[plan.holders[0]]))

        self.contribute(w, entered_with, exchanged)

    def plan_of(self, generation: Generation) -> HealPlan:
        values = self.rounds[generation.number, 0]
        names = [values[r][0] for r in range(generation.world_size)]
        outside = [n.step == self.steps for n in names]
        return heal_plan.plan(names, outside, [m.since_generation for m in generation.members])

    def take_part(self, w: Worker, generation: Generation, source: Any) -> None:
        """Copy the state, now or beside the step, or go on."""
        plan, rank, token = w.plan, self.rank(w, generation), w.token
        assert plan is not None
        if rank not in plan.healing:
            w.taking_part = True
            self.next_collective(w)
            return
        _, chain, history, counted = source
        assert counted, "I6: a state that was forgotten becomes the job's"

        def swap_in(then: Callable[[], None]) -> None:
            self.count("copied")
            w.chain, w.counted = chain, True
            w.history, lines = history.copied(w.worker_id, self.roster(generation))
            self.write(w, lines, then)

        def go_on() -> None:
            w.taking_part = True
            self.next_collective(w)

        def arrive() -> None:
            if (
                not w.alive
                or w.current is not generation
                or w.broken
                or (rank in plan.at_once and w.token != token)
            ):
                return
            lost = any(r in self.gone_from.get(generation.number, ()) for r in plan.holders)
            if w.node.cut or (lost and self.random.random() < 0.7):
                self.count("copy broke")
                self.fail(w, w.token)
            elif rank in plan.at_once:
                swap_in(go_on)
            else:
                w.copied = True
                if w.held is not None:
                    w.held()

        w.swap_in = swap_in
        self.after(self.latency_s(0.02, 0.3), w.node.agent_id, arrive)
        if rank in plan.beside:
            go_on()

    def next_collective(self, w: Worker) -> None:
        """The next step, or one of the two collectives of the end."""
        generation, plan = w.current, w.plan
        assert generation is not None and plan is not None
        if w.broken:
            self.boundary(w)
            return
        healing = plan.beside if w.round == 1 else frozenset()
        shadow = self.rank(w, generation) in healing
        name = plan.furthest if shadow else w.name
        roster = self.roster(generation)
        if name.step < self.steps:

            def reduced(values: dict[int, Any]) -> None:
                vs = [float(values[r]) for r in range(generation.world_size)]
                agreed = switch_pair.agreed((sum(vs), sum(v * v for v in vs)), len(vs))

                def release() -> None:
                    w.held = None
                    w.history, lines = w.history.collective_completed(
                        name.step + 1, healing, w.worker_id, roster
                    )
                    self.write(w, lines, lambda: self.commit(w, generation, healing, agreed))

                if not shadow:
                    release()
                    return
                w.held = lambda: w.swap_in(release)
                if w.copied:
                    w.held()

            token = w.token

            def contribute() -> None:
                if w.token == token and w.alive and w.current is generation and not w.broken:
                    newest = w.node.newest
                    pending = None if newest is None else newest.number
                    listed = newest is not None and newest.placement_of(w.worker_id) is not None
                    built = not listed or (w.built is not None and w.built.number == pending)
                    v = switch_pair.contribution(pending, generation.number, built)
                    self.contribute(w, v, reduced)

            self.after(self.latency_s(0.01, 0.06), w.node.agent_id, contribute)
        elif name.operations == 0:

            def everyone_has_it(values: dict[int, Any]) -> None:
                w.history, lines = w.history.collective_completed(
                    name.step + 1, frozenset(), w.worker_id, roster
                )
                w.chain = (*w.chain, ("end", generation.number))
                self.named(w)
                self.write(w, lines, lambda: self.boundary(w))

            self.contribute(w, 0.0, everyone_has_it)
        else:
            self.contribute(w, 0.0, lambda values: self.finished(w, generation))

    def commit(self, w: Worker, generation: Generation, healing: frozenset[int], agreed: int | None) -> None:
        step = w.name.step + 1
        entry = Entry(
            generation.number,
            step,
            (("batch", step),),
            tuple(m.worker_id for m in generation.members),
            healing,
            self.now_s,
        )
        w.history = w.history.committed(entry)
        w.chain = (*w.chain, ("step", generation.number, step))
        self.named(w)
        if agreed is not None:
            w.agreed = self.records[generation.number + agreed]
        if w.reported < generation.number:
            w.reported = generation.number
            self.after(self.latency_s(0.001, 0.2), w.node.agent_id, lambda: self.put_member(w))
        self.boundary(w)

    def named(self, w: Worker) -> None:
        known = self.states.setdefault(w.name, w.chain)
        assert known == w.chain, f"I3: two states are called {w.name}: {known} and {w.chain}"

    def finished(self, w: Worker, generation: Generation) -> None:
        self.check_nothing_lost(w.chain)
        self.say(f"{w.worker_id} has confirmed the end")
        w.confirmed = True

        def tell() -> None:
            if not w.node.cut and "closing" not in self.keys:
                self.put("closing", ev.ClosingSeen, generation=generation.number)

        self.after(self.latency_s(), w.node.agent_id, tell)
        self.end(w, well=True, trained=True)

    # -- collectives

    @staticmethod
    def rank(w: Worker, generation: Generation) -> int:
        placement = generation.placement_of(w.worker_id)
        assert placement is not None
        return placement.global_rank

    @staticmethod
    def roster(generation: Generation) -> frozenset[str]:
        return frozenset(m.worker_id for m in generation.members)

    def contribute(self, w: Worker, value: object, then: Callable[[dict[int, Any]], None]) -> None:
        """Bring `value` to the generation's next collective; `then` gets all values, if it completes."""
        generation = w.current
        assert generation is not None
        key = (generation.number, w.round)
        values = self.rounds.setdefault(key, {})
        w.round += 1
        w.in_collective = True
        w.token += 1
        w.then = then
        rank, token = self.rank(w, generation), w.token

        def arrive() -> None:
            if not w.alive or (w.node.cut and not self.is_within(generation, w.node)):
                return
            values[rank] = value
            if len(values) == generation.world_size:
                for m in generation.members:
                    peer = self.workers[m.worker_id]
                    if peer.in_collective and peer.current is generation and peer.round == key[1] + 1:
                        self.complete_soon(generation, peer, dict(values))

        self.after(self.latency_s(), w.node.agent_id, arrive)
        peers = [self.workers[m.worker_id] for m in generation.members]
        if self.gone_from.get(generation.number) or any(not p.alive and p.node.alive for p in peers):
            self.after(self.latency_s(), w.node.agent_id, lambda: self.maybe_fail(w, token, values))
        self.watch_stall(w, token, generation)

    def complete_soon(self, generation: Generation, w: Worker, values: dict[int, Any]) -> None:
        token, then = w.token, w.then

        def complete() -> None:
            if (
                w.alive
                and w.token == token
                and w.current is generation
                and (not w.node.cut or self.is_within(generation, w.node))
            ):
                assert then is not None
                w.in_collective = False
                w.token += 1
                then(values)

        self.after(self.latency_s(0.001, 0.03), w.node.agent_id, complete)

    def maybe_fail(self, w: Worker, token: int, values: dict[int, Any]) -> None:
        """A peer's side is closed. If all had contributed, the result may still arrive, or not."""
        if w.token != token or w.current is None:
            return
        complete = len(values) == w.current.world_size
        if complete:
            self.count("a result under way when a peer went")
        if not complete or self.random.random() < 0.5:
            self.fail(w, token)

    def close_side(self, w: Worker, generation: Generation) -> None:
        """`w` takes no part in `generation` any more; its peers notice, if they can hear it."""
        gone = self.gone_from.setdefault(generation.number, set())
        rank = self.rank(w, generation)
        if rank in gone:
            return
        gone.add(rank)
        if w.agreed is not None and w.alive:
            return  # it switched, in order: the others have what they need to do the same
        if not w.node.cut:
            self.tell_peers(w, generation)

    def tell_peers(self, w: Worker, generation: Generation) -> None:
        """The end of a connection reaches a worker that waits for something on it."""
        for m in generation.members:
            peer = self.workers[m.worker_id]
            if peer.alive and peer.current is generation and peer.in_collective and not peer.node.cut:
                values = self.rounds[generation.number, peer.round - 1]
                self.after(
                    self.latency_s(0.001, 0.03),
                    peer.node.agent_id,
                    lambda peer=peer, token=peer.token, values=values: self.maybe_fail(peer, token, values),  # type: ignore[misc]
                )

    def process_gone(self, w: Worker) -> None:
        """Its sockets close, also those to generations that it had yet to enter."""
        for peer in self.workers.values():
            generation = peer.current
            if generation is not None and generation.placement_of(w.worker_id) is not None:
                self.close_side(w, generation)

    def fail(self, w: Worker, token: int) -> None:
        """The generation is of no use to `w` any more. Lines that it owes it writes all the same."""
        generation = w.current
        if not w.alive or w.token != token or generation is None or w.broken:
            return
        w.broken, w.agreed, w.held = True, None, None
        self.close_side(w, generation)
        newest = w.node.newest
        if newest is None or not is_superseded(generation, newest, newcomer=False):
            self.suspect(w, generation.number, broken=True)
        if not w.taking_part:
            w.floor = max(w.floor, generation.number)
            w.current, w.previous = w.previous, None
            w.broken = w.current is not None
            w.taking_part = w.current is not None
        if not w.is_writing:
            self.boundary(w)

    def watch_stall(self, w: Worker, token: int, generation: Generation) -> None:
        def look() -> None:
            if not w.alive or w.token != token or not w.in_collective:
                return
            newest = w.node.newest
            if newest is not None and newest.base < generation.number < newest.number:
                # Superseded while it was pending, for a newcomer died; and yet this worker switched to it.
                # Where no connection ends, only this shows the leader that no worker can continue.
                self.count("stalled in a superseded generation")
                self.fail(w, token)
            else:
                self.suspect(w, generation.number, broken=False)
                self.after(STALL_S, w.node.agent_id, look)

        self.after(STALL_S, w.node.agent_id, look)

    # -- the ledger

    def write(self, w: Worker, lines: tuple[Line, ...], then: Callable[[], None]) -> None:
        """One line after the other, whatever else happens; a kill may come between two."""
        generation = w.current
        w.is_writing = True

        def one(rest: tuple[Line, ...]) -> None:
            if w.dies_between_lines and rest and rest is not lines:
                self.kill_worker(w)
            if not w.alive:
                if rest and rest is not lines:
                    self.count("killed between two lines")
                return
            if rest:
                if w.worker_id != rest[0].entry.workers[rest[0].global_rank]:
                    self.count("line written for another")
                self.write_line(rest[0])
                self.after(self.latency_s(0.0001, 0.002), w.node.agent_id, lambda: one(rest[1:]))
                return
            w.is_writing = False
            if w.current is generation:
                then()
            else:
                self.boundary(w)  # entering failed meanwhile

        one(lines)

    def write_line(self, line: Line) -> None:
        entry = line.entry
        for (generation, step, _), other in self.ledger.items():
            assert step != entry.step or generation == entry.generation, f"I1: {other} and {entry}"
        self.ledger[entry.generation, entry.step, line.global_rank] = entry

    def check_nothing_lost(self, chain: Chain) -> None:
        steps = [c for c in chain if c[0] == "step"]
        assert [c[2] for c in steps] == list(range(1, self.steps + 1)), f"I2: {chain}"
        for _, generation, step in steps:
            for rank in range(self.records[int(generation)].world_size):
                assert (generation, step, rank) in self.ledger, (
                    f"I2: no line of rank {rank} for step {step} of generation {generation}"
                )

    def generation_written(self, generation: Generation) -> None:
        if not generation.members:
            return
        written = {(g, s) for g, s, _ in self.ledger}
        for m in generation.members:
            w = self.workers[m.worker_id]
            if m.holder and w.alive and heal_plan.counted_name(w.name, m.since_generation) > StateName():
                has = {(c[1], c[2]) for c in w.chain if c[0] == "step"}
                assert written <= has, f"I6: {m.worker_id} counts as a holder and lacks {written - has}"

    @property
    def succeeded(self) -> bool:
        return self.result is not None and self.result.outcome is ResultOutcome.SUCCEEDED
