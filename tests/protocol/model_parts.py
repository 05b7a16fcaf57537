"""What events of the explored protocol look up in its state, and how they change it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from functools import cache

from model_state import (
    DIRTY,
    DONE,
    FAILED,
    GONE,
    NAMES,
    WAIT,
    Chain,
    Gen,
    Lines,
    Setup,
    State,
    Violation,
    Worker,
    _histories,
    _intern,
    _name_of,
    _steps,
)

from bagua_contract.records import StateName
from bagua_core.elastic.heal.heal_plan import HealPlan
from bagua_core.elastic.step.step_states import Phase


@cache
def _roster(members: tuple[int, ...]) -> frozenset[str]:
    return frozenset(NAMES[w] for w in members)


class ModelParts:
    """Lookups and changes; coverage counts what the exploration met."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.rules = setup.rules
        self.coverage: Counter[str] = Counter()
        # The decisions are pure, and thousands of states ask the same of them.
        self._plans: dict[object, HealPlan] = {}
        self._entered: dict[object, Lines] = {}
        self._completed: dict[object, tuple[int, Lines]] = {}
        self._commits: dict[object, tuple[int, int]] = {}

    def plan_of(self, gen: Gen) -> HealPlan:
        key = (gen.known, gen.since)
        plan = self._plans.get(key)
        if plan is None:
            known = [k for k in gen.known if k is not None]
            names = [_name_of(chain) if counts else StateName() for chain, _, counts in known]
            outside = [self.setup.outside or n.step == self.setup.steps for n in names]
            since = list(gen.since) if self.rules.forget_when_dropped else [0] * len(names)
            plan = self.rules.plan(names, outside, since)
            if self.setup.behind_beside and not plan.initial and not any(outside):
                plan = HealPlan(
                    plan.furthest, plan.holders, frozenset(), plan.healing, plan.initial, plan.reason
                )
            self._plans[key] = plan
        return plan

    @staticmethod
    def gen_of(s: State, number: int) -> Gen:
        for gen in s.gens:
            if gen.number == number:
                return gen
        raise LookupError(f"generation {number} is forgotten")

    @staticmethod
    def roster(gen: Gen) -> frozenset[str]:
        return _roster(gen.members)

    def due_when_entered(self, history: int, w: int, gen: Gen) -> Lines:
        key = (history, w, gen.members)
        due = self._entered.get(key)
        if due is None:
            due = self.rules.entered(_histories[history], NAMES[w], self.roster(gen))
            self._entered[key] = due
        return due

    @staticmethod
    def newcomers(gen: Gen) -> list[int]:
        return [m for m, since in zip(gen.members, gen.since, strict=True) if since == gen.number]

    def healing_now(self, gen: Gen, round: int) -> frozenset[int]:
        return self.plan_of(gen).beside if round == 1 else frozenset()

    def must_copy(self, gen: Gen, w: int, worker: Worker) -> bool:
        """Whether `w` still waits for a copy, at once or beside the step."""
        if worker.round != 1 or worker.copied:
            return False
        return gen.members.index(w) in self.plan_of(gen).healing

    def step_of(self, s: State, w: int, worker: Worker) -> Phase:
        """The state of the step on a worker, as the engine has it. At the end collectives are outside steps."""
        if worker.phase == FAILED:
            return Phase.FAILED
        if worker.phase in (WAIT, *GONE) or worker.round == 0:
            return Phase.BETWEEN
        gen = self.gen_of(s, worker.gen)
        lacking = self.must_copy(gen, w, worker)
        if worker.phase == DONE and not lacking:
            return Phase.FINAL
        chain = self._known_chain(gen, self.plan_of(gen)) if lacking else worker.chain
        return Phase.RUNNING if _name_of(chain).step < self.setup.steps else Phase.BETWEEN

    @staticmethod
    def _known_chain(gen: Gen, plan: HealPlan) -> Chain:
        known = gen.known[plan.holders[0]]
        assert known is not None
        return known[0] if known[2] else (DIRTY,)

    def is_broken(self, s: State, gen: Gen) -> bool:
        return any(s.workers[m].phase in GONE for m in gen.members)

    @staticmethod
    def _joinable(s: State, inside: Iterable[int]) -> list[int]:
        return [
            w
            for w, worker in enumerate(s.workers)
            if worker.phase not in GONE and w not in inside and not s.leaving >> w & 1
        ]

    # -- changing things

    @staticmethod
    def _set(s: State, w: int, worker: Worker) -> State:
        return State((*s.workers[:w], worker, *s.workers[w + 1 :]), *s[1:])

    @staticmethod
    def _set_gen(s: State, gen: Gen) -> State:
        return State(s.workers, tuple([gen if g.number == gen.number else g for g in s.gens]), *s[2:])

    def _contribute(self, s: State, w: int, number: int, v: float, known: object = None) -> State:
        gen = self.gen_of(s, number)
        i = gen.members.index(w)
        gen = gen._replace(
            counts=(*gen.counts[:i], gen.counts[i] + 1, *gen.counts[i + 1 :]),
            vs=(*gen.vs[:i], v, *gen.vs[i + 1 :]),
        )
        if known is not None:
            gen = gen._replace(known=(*gen.known[:i], known, *gen.known[i + 1 :]))  # type: ignore[arg-type]
        return self._set_gen(s, gen)

    def _write(self, s: State, w: int, due: Lines, label: str) -> Iterator[tuple[str, State, bool]]:
        """All lines, or some and death. Yields (label, state, alive)."""
        if not due:
            yield label, s, True
            return
        lines = [(_intern(line.entry), line.global_rank) for line in due]
        lines.sort(key=lambda line: _steps[line[0]].workers[line[1]] != NAMES[w])
        if any(_steps[i].workers[r] != NAMES[w] for i, r in lines):
            self.coverage["line written for another"] += 1
        ledger = s.ledger
        for n, (step_id, rank) in enumerate(lines, 1):
            step = _steps[step_id]
            for other, _ in ledger:
                if _steps[other].step == step.step and other != step_id:
                    raise Violation(f"I1: step {step.step} under generations {_steps[other].generation} and "
                                    f"{step.generation}: {label}")  # fmt: skip
            ledger |= {(step_id, NAMES.index(step.workers[rank]))}
            if n < len(lines) and s.kills:
                self.coverage["died between two lines"] += 1
                yield (
                    f"{label}, dies after {n} of {len(lines)} lines",
                    s._replace(ledger=ledger, kills=s.kills - 1),
                    False,
                )
        yield label, s._replace(ledger=ledger), True

    # -- an invariant that several events check

    @staticmethod
    def _check_nothing_lost(s: State, chain: Chain, label: str) -> None:
        for step_id in chain[1:]:
            if step_id < 0:
                continue
            for worker_id in _steps[step_id].workers:
                if (step_id, NAMES.index(worker_id)) not in s.ledger:
                    raise Violation(
                        f"I2: no line of {worker_id} for step {_steps[step_id].step} under "
                        f"generation {_steps[step_id].generation}: {label}"
                    )
