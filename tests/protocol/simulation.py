"""Whole jobs in virtual time: workers that reduce, commit, heal and end, under seeded faults.

Owns what a worker does between two records, with the real decisions: following, switch_pair, heal_plan and
commit_history; the leader is the real machine (simulated_store.py). simulated_nodes.py has nodes and faults,
simulated_collectives.py the collectives. No torch, no processes, no waiting. The same seed gives the same job,
and its `story` tells it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from simulated_collectives import SimulatedCollectives
from simulated_store import Node
from simulated_worker import Chain, Worker

from bagua_agent.membership import events as ev
from bagua_agent.membership.actions import ResultOutcome
from bagua_contract.records import Generation, StateName
from bagua_core.elastic.heal import heal_plan
from bagua_core.elastic.heal.heal_plan import HealPlan
from bagua_core.elastic.membership import switch_pair
from bagua_core.elastic.membership.following import FollowingSituation, Move, decide, is_superseded
from bagua_core.elastic.state.commit_history import Entry, History, Line


class SimulatedJob(SimulatedCollectives):
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
