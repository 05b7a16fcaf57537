"""The protocol of docs/design/ as a transition system small enough to explore completely.

Owns the atomic events of up to four workers, a leader and the ledger, and the invariants I1 to I6. The
decisions are the real ones (heal_plan, switch_pair, commit_history) unless `Rules` replaces one, which is how
the tests show that each rule is needed. Nothing is sampled: `explore` visits every reachable state.

Reductions, none of which hides a state that matters:
- A rank that owes lines does nothing else, so it writes them all in the event that made them due, or dies
  having written some: dying then or later looks the same to all others.
- What only its own worker can see (committing a step that waits for no copy) is part of the event before it.
- A contribution that no rank can wait for any more is left out; so is a failure where a loss is coming anyway.
- `_only_awaited`: an event that commutes with all others goes first. A test compares with all orders.
I5 needs no check here: a generation is written as one more than the one before, by one compare-and-set.
"""

from __future__ import annotations

import gc
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache
from typing import NamedTuple

from bagua_contract.records import StateName
from bagua_core.elastic.heal import heal_plan
from bagua_core.elastic.heal.heal_plan import HealPlan
from bagua_core.elastic.membership import switch_pair
from bagua_core.elastic.state.commit_history import Entry, History, Line
from bagua_core.elastic.step.step_states import TRANSITIONS, Event, Phase

NAMES = "abcd"

# phases of a worker
WAIT, READY, CONTRIBUTED, DONE, FAILED, ENDED, LEFT, DEAD = range(8)
GONE = (ENDED, LEFT, DEAD)
PLANNED, FAILOVER = "planned", "loss"

# A state's content is all that made it: whose initial parameters, then every commit. A positive number is the
# place of a Entry in `_steps`, a negative one a collective outside steps in that generation.
Chain = tuple[int, ...]
Lines = tuple[Line, ...]
_steps: list[Entry] = []
_step_ids: dict[Entry, int] = {}
# Likewise a History, so that states are quick to compare.
_histories: list[History] = [History()]
_history_ids: dict[History, int] = {History(): 0}
DIRTY = -99  # initial "parameters" of a worker that lost its claim to a state: no worker may build on them


class Worker(NamedTuple):
    phase: int
    gen: int = 0
    round: int = 0  # of its generation: 0 exchanges the names, the others are reductions
    chain: Chain = ()
    history: int = 0  # place in `_histories`
    built: int = 0  # newest pending generation whose communicator it has built
    copied: bool = False


class Gen(NamedTuple):
    """counts: rounds each member has contributed to. vs: its v in the last of them. known: what it brought to
    the exchange (chain, history, counted name)."""

    number: int
    kind: str
    members: tuple[int, ...]
    since: tuple[int, ...]
    holder: tuple[bool, ...]
    counts: tuple[int, ...]
    vs: tuple[float, ...]
    known: tuple[tuple[Chain, int, bool] | None, ...]


class State(NamedTuple):
    workers: tuple[Worker, ...]
    gens: tuple[Gen, ...]  # the last is what the store shows
    in_force: int  # as the leader knows it
    reported: int  # bits: a commit since its join was reported
    ledger: frozenset[tuple[int, int]]  # (step id, worker)
    leaving: int  # bits
    closing: bool
    kills: int
    wrong_drops: int


class Violation(AssertionError):
    pass


@cache
def step_after(phase: Phase, *events: Event) -> Phase:
    """Where a step that is in `phase` comes by `events`, by the engine's own table."""
    for event in events:
        after = TRANSITIONS.get((phase, event))
        if after is None:
            raise Violation(f"a step that is {phase.value} cannot {event.value}")
        phase = after
    return phase


def _name(chain: Chain) -> StateName:
    steps = [c for c in chain[1:] if c >= 0]
    if len(chain) < 2:
        return StateName()
    last = chain[-1]
    operations = 0
    while chain[-1 - operations] < 0 and operations < len(chain) - 1:
        operations += 1
    return StateName(-last if last < 0 else _steps[last].generation, len(steps), operations)


_name_of = lru_cache(maxsize=None)(_name)


def _intern(step: Entry) -> int:
    if step not in _step_ids:
        _step_ids[step] = len(_steps)
        _steps.append(step)
    return _step_ids[step]


def _intern_history(history: History) -> int:
    if history not in _history_ids:
        _history_ids[history] = len(_histories)
        _histories.append(history)
    return _history_ids[history]


@dataclass(frozen=True)
class Rules:
    """The protocol's decisions; a test replaces one to show that the invariants notice."""

    plan: Callable[..., HealPlan] = heal_plan.plan
    agreed: Callable[[tuple[float, float], int], int | None] = switch_pair.agreed
    collective_completed: Callable[..., tuple[History, Lines]] = History.collective_completed
    entered: Callable[..., Lines] = History.entered
    copied: Callable[..., tuple[History, Lines]] = History.copied
    trim: Callable[[History], History] = lambda history: history
    own_line_at_commit: bool = False
    holder_by_any_commit: bool = False  # not only by one since it last joined
    forget_when_dropped: bool = True  # since_generation starts anew for a worker that a generation omitted
    holder_required: bool = True
    holder_by_carrying_over: bool = False  # a member of the generation before counts as a holder
    # whether a member of the base that a pending record left out, and that failed in the base, counts as a
    # holder once no other does: never, "always", or only together "with newcomers" of the record
    base_holds: str = ""
    planned_needs_in_force: bool = True
    second_end_collective: bool = True
    first_commit_known_by_report: bool = False  # until then the job may begin anew


@dataclass(frozen=True)
class Setup:
    """One exploration. newcomers: a fourth worker waits to join. leavers: bits that ask to go."""

    steps: int = 2
    workers: int = 3
    newcomer: bool = False
    leavers: int = 0
    kills: int = 1
    wrong_drops: int = 0
    minimum: int = 1
    unequal_start: bool = False  # generation 1 has yet to copy rank 0's initial parameters
    outside: bool = False  # holders stand outside a step whenever names are exchanged
    eager: bool = True  # the reduction of `_only_awaited`
    stop_at_end: bool = False  # explore nothing after the first rank that confirmed the end
    behind_beside: bool = False  # members one commit behind copy in the shadow step as well
    rules: Rules = field(default_factory=Rules)


class Model:
    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.rules = setup.rules
        self.coverage: Counter[str] = Counter()
        self._plans: dict[object, HealPlan] = {}

    # -- the start

    def initial(self) -> State:
        count = self.setup.workers
        members = tuple(range(count))
        if self.setup.unequal_start:
            workers = tuple(Worker(CONTRIBUTED, 1, 0, (w,)) for w in members)
        else:
            workers = tuple(Worker(READY, 1, 1, (0,), copied=True) for w in members)
        if self.setup.newcomer:
            workers += (Worker(WAIT, 0, 0, (count,)),)
        known = tuple((w.chain, 0, True) for w in workers[:count])
        first = Gen(1, FAILOVER, members, (1,) * count, (True,) * count, (1,) * count, (0.0,) * count, known)
        return State(
            workers, (first,), 1, 0, frozenset(), self.setup.leavers, False, self.setup.kills,
            self.setup.wrong_drops,
        )  # fmt: skip

    # -- looking things up

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
        return next(g for g in s.gens if g.number == number)

    @staticmethod
    def roster(gen: Gen) -> frozenset[str]:
        return frozenset(NAMES[w] for w in gen.members)

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

    def is_broken(self, s: State, gen: Gen) -> bool:
        return any(s.workers[m].phase in GONE for m in gen.members)

    # -- changing things

    @staticmethod
    def _set(s: State, w: int, worker: Worker) -> State:
        return s._replace(workers=(*s.workers[:w], worker, *s.workers[w + 1 :]))

    @staticmethod
    def _set_gen(s: State, gen: Gen) -> State:
        return s._replace(gens=tuple(gen if g.number == gen.number else g for g in s.gens))

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

    # -- events of one worker

    def worker_events(self, s: State, w: int) -> Iterator[tuple[str, State]]:
        worker, newest, me = s.workers[w], s.gens[-1], NAMES[w]
        if worker.phase in GONE:
            return
        number = newest.number
        listed = w in newest.members
        overtaken = newest.kind == FAILOVER and number > worker.gen
        gen = self.gen_of(s, worker.gen) if worker.gen else None

        if worker.phase == READY and gen is not None and not overtaken:
            pending = number if number > worker.gen else None
            concerned = listed or s.leaving >> w & 1
            reachable = all(s.workers[m].phase != DEAD for m in self.newcomers(newest))
            if pending and worker.built < number and concerned and reachable:
                yield f"{me} builds {number}", self._set(s, w, worker._replace(built=number))
            index = gen.members.index(w)
            if not (self.must_copy(gen, w, worker) and index in self.plan_of(gen).at_once):
                v = switch_pair.contribution(worker.built or None, worker.gen, worker.built > worker.gen)
                after = self._contribute(s, w, worker.gen, v)
                yield (
                    f"{me} contributes to round {worker.round} of {worker.gen}",
                    self._set(after, w, worker._replace(phase=CONTRIBUTED)),
                )

        if worker.phase == CONTRIBUTED and gen is not None and min(gen.counts) > worker.round:
            yield from self._complete(s, w, worker, gen)

        if (
            gen is not None
            and worker.phase in (READY, CONTRIBUTED, DONE)
            and worker.round == 1
            and not overtaken
            and self.must_copy(gen, w, worker)
        ):
            beside = gen.members.index(w) in self.plan_of(gen).beside
            if beside == (worker.phase != READY):
                yield from self._copy(s, w, worker, gen)

        if worker.phase == DONE and gen is not None:
            own_copy_missing = self.must_copy(gen, w, worker)
            others_copied = not any(
                s.workers[m].gen == gen.number and self.must_copy(gen, m, s.workers[m]) for m in gen.members
            )
            if not own_copy_missing and (others_copied or overtaken or self.is_broken(s, gen)):
                if not others_copied:
                    self.coverage["holder went on while a copy broke"] += 1
                yield from self._commit(s, w, worker, gen, f"{me} commits")

        if (
            worker.phase in (CONTRIBUTED, DONE)
            and gen is not None
            and not overtaken
            and self.is_broken(s, gen)
            and (worker.phase == CONTRIBUTED or self.must_copy(gen, w, worker))
            # Where a loss is coming anyway, entering it says the same.
            and not (listed and any(s.workers[m].phase == DEAD for m in newest.members))
        ):
            if any(c > worker.round + 1 for c in gen.counts) or any(
                s.workers[m].gen > gen.number for m in gen.members
            ):
                self.coverage["failed what others completed"] += 1
            step = self.step_of(s, w, worker)
            if step is not Phase.BETWEEN:
                assert step_after(step, Event.FAIL) is Phase.FAILED
            yield f"{me} fails in {gen.number}", self._set(s, w, worker._replace(phase=FAILED))

        if listed and number > worker.gen and (worker.phase != DONE or overtaken):
            since = newest.since[newest.members.index(w)]
            waits_for_commit = worker.phase == DONE and gen is not None and not self.must_copy(gen, w, worker)
            if (newest.kind == FAILOVER or since == number) and not waits_for_commit:
                if worker.phase == DONE:
                    self.coverage["reduced, but the copy broke"] += 1
                yield f"{me} enters {number}", self._enter(s, w, worker, newest)

        if s.leaving >> w & 1 and not listed and (newest.kind == FAILOVER or worker.phase == FAILED):
            self.coverage["leaver gone without its last step"] += 1
            yield f"{me} leaves", self._set(s, w, Worker(LEFT))

    def _complete(self, s: State, w: int, worker: Worker, gen: Gen) -> Iterator[tuple[str, State]]:
        me, roster = NAMES[w], self.roster(gen)
        label = f"{me} completes round {worker.round} of {gen.number}"
        if worker.round == 0:
            plan = self.plan_of(gen)
            if self._known_chain(gen, plan)[0] == DIRTY:
                raise Violation(f"I6: a forgotten state becomes the job's: {label}")
            if plan.initial:
                self.coverage["copied initial parameters"] += 1
            due = self.rules.entered(_histories[worker.history], me, roster)
            for text, after, alive in self._write(s, w, due, label):
                ready = worker._replace(phase=READY, round=1, copied=False)
                yield text, self._set(after, w, ready if alive else Worker(DEAD))
            return

        lacking = self.must_copy(gen, w, worker)
        reference = self._known_chain(gen, self.plan_of(gen)) if lacking else worker.chain
        name = _name_of(reference)
        if name.step < self.setup.steps:
            healing = self.healing_now(gen, worker.round)
            history, due = self._released(worker, name.step, healing, me, roster)
            for text, after, alive in self._write(s, w, due, label):
                if not alive:
                    yield text, self._set(after, w, Worker(DEAD))
                elif healing:
                    yield text, self._set(after, w, worker._replace(phase=DONE, history=history))
                else:
                    yield from self._commit(after, w, worker._replace(history=history), gen, text)
        elif name.operations == 0:
            history, due = self._released(worker, name.step, frozenset(), me, roster)
            for text, after, alive in self._write(s, w, due, label + " (first of the end)"):
                chain = (*worker.chain, -gen.number)
                ready = worker._replace(phase=READY, round=worker.round + 1, chain=chain, history=history)
                if not self.rules.second_end_collective:
                    ready = Worker(ENDED, chain=chain)
                yield text, self._set(after, w, ready if alive else Worker(DEAD))
        else:
            self._check_nothing_lost(s, worker.chain, label)
            self.coverage["a rank confirmed the end"] += 1
            yield label + " (second of the end)", self._set(s, w, Worker(ENDED, chain=worker.chain))

    def _released(
        self, worker: Worker, step: int, healing: frozenset[int], me: str, roster: frozenset[str]
    ) -> tuple[int, Lines]:
        history = _histories[worker.history]
        history, due = self.rules.collective_completed(history, step + 1, healing, me, roster)
        return _intern_history(history), due

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

    @staticmethod
    def _known_chain(gen: Gen, plan: HealPlan) -> Chain:
        known = gen.known[plan.holders[0]]
        assert known is not None
        return known[0] if known[2] else (DIRTY,)

    def _commit(self, s: State, w: int, worker: Worker, gen: Gen, label: str) -> Iterator[tuple[str, State]]:
        name = _name_of(worker.chain)
        step = Entry(
            generation=gen.number,
            step=name.step + 1,
            position=(("batch", name.step),),
            workers=tuple(NAMES[m] for m in gen.members),
            healing=self.healing_now(gen, worker.round),
        )
        history = self.rules.trim(_histories[worker.history].committed(step))
        before = self.step_of(s, w, worker)
        events = (Event.COMMIT,) if before is Phase.FINAL else (Event.REDUCE, Event.COMMIT)
        assert step_after(before, *events) is Phase.BETWEEN
        committed = worker._replace(
            phase=WAIT, chain=(*worker.chain, _intern(step)), history=_intern_history(history)
        )
        if self.rules.own_line_at_commit:
            own = (Line(step, step.workers.index(NAMES[w])),)
            s = list(self._write(s, w, own, label))[-1][1]
        agreed = None
        if not any(c > worker.round + 1 for c in gen.counts):
            agreed = self.rules.agreed((sum(gen.vs), sum(v * v for v in gen.vs)), len(gen.members))
        own_v = gen.vs[gen.members.index(w)]
        if agreed is not None and own_v:
            target = self.gen_of(s, gen.number + int(own_v))
            if any(s.workers[m].phase == DEAD for m in gen.members):
                self.coverage["switched although a member died"] += 1
            if s.gens[-1].number > target.number:
                self.coverage["switched to a superseded generation"] += 1
            if w not in target.members:
                self.coverage["left with the switch"] += 1
                yield label + ", leaves", self._set(s, w, Worker(LEFT))
            else:
                yield label + f", switches to {target.number}", self._enter(s, w, committed, target)
            return
        ready = committed._replace(phase=READY, round=worker.round + 1, copied=False)
        yield label, self._set(s, w, ready)

    def _copy(self, s: State, w: int, worker: Worker, gen: Gen) -> Iterator[tuple[str, State]]:
        plan = self.plan_of(gen)
        source = gen.known[plan.holders[0]]
        assert source is not None
        if any(s.workers[gen.members[h]].phase == DEAD for h in plan.holders):
            self.coverage["last bytes of a source that died"] += 1
        chain = source[0] if source[2] else (DIRTY,)
        history, due = self.rules.copied(_histories[source[1]], NAMES[w], self.roster(gen))
        for text, after, alive in self._write(s, w, due, f"{NAMES[w]} has copied in {gen.number}"):
            self.coverage["copied"] += 1
            copied = worker._replace(chain=chain, history=_intern_history(history), copied=True)
            yield text, self._set(after, w, copied if alive else Worker(DEAD))

    def _enter(self, s: State, w: int, worker: Worker, gen: Gen) -> State:
        step = self.step_of(s, w, worker)
        if step is Phase.RUNNING:
            step = step_after(step, Event.FAIL)  # a loss ends a step that no reduction has made final
        if step is not Phase.BETWEEN:
            assert step_after(step, Event.ROLL_BACK) is Phase.BETWEEN
        since = gen.since[gen.members.index(w)]
        if worker.chain[0] == DIRTY or (
            self.rules.forget_when_dropped
            and len(worker.chain) > 1
            and heal_plan.counted_name(_name_of(worker.chain), since).is_none
        ):
            # Named none from here on, but the parameters are still what they became.
            if len(worker.chain) > 1 or worker.phase != WAIT:
                self.coverage["forgot what the job may have undone"] += 1
            worker = worker._replace(chain=(DIRTY,), history=0)
        known = (worker.chain, worker.history, worker.chain[0] != DIRTY)
        after = self._contribute(s, w, gen.number, 0.0, known)
        return self._set(after, w, Worker(CONTRIBUTED, gen.number, 0, worker.chain, worker.history, 0, False))

    # -- the leader and the world around

    def leader_events(self, s: State) -> Iterator[tuple[str, State]]:
        newest = s.gens[-1]
        for w, worker in enumerate(s.workers):
            if worker.phase in GONE or w not in newest.members or worker.chain[0] == DIRTY:
                continue
            i = newest.members.index(w)
            generation = _name_of(worker.chain).generation
            news = generation == newest.number > s.in_force
            if generation >= newest.since[i] and (news or not (newest.holder[i] or s.reported >> w & 1)):
                in_force = max(s.in_force, generation if generation == newest.number else 0)
                yield (
                    f"{NAMES[w]}'s commit in {generation} is reported",
                    s._replace(in_force=in_force, reported=s.reported | 1 << w),
                )
        if any(worker.phase == ENDED for worker in s.workers) and not s.closing:
            yield "closing is written", s._replace(closing=True)
        dead = [m for m in newest.members if s.workers[m].phase in (DEAD, ENDED)]
        suspected = any(
            worker.phase == FAILED
            and w in newest.members
            and worker.gen >= s.in_force
            and not (newest.kind == FAILOVER and newest.number > worker.gen)  # else it is about to enter
            for w, worker in enumerate(s.workers)
        )
        for mask in range(1, 1 << len(dead)):
            yield from self._loss(s, {m for n, m in enumerate(dead) if mask >> n & 1})
        if suspected and not dead:
            self.coverage["loss generation with the same members"] += 1
            yield from self._loss(s, set())
        if s.wrong_drops:
            for m in newest.members:
                if s.workers[m].phase not in GONE and s.workers[m].phase != WAIT:
                    for text, after in self._loss(s._replace(wrong_drops=s.wrong_drops - 1), {m}):
                        self.coverage["dropped a living worker"] += 1
                        yield text + " wrongly", after

        if newest.kind == PLANNED and newest.number > s.in_force:
            lost = {m for m in self.newcomers(newest) if s.workers[m].phase == DEAD}
            if lost:
                self.coverage["superseded a pending generation"] += 1
                yield from self._write_generation(s, PLANNED, [m for m in newest.members if m not in lost])
        if s.in_force == newest.number or (not self.rules.planned_needs_in_force and newest.kind == FAILOVER):
            joining = self._joinable(s, newest.members)
            leaving = [w for w in newest.members if s.leaving >> w & 1]
            if any(s.workers[w].phase != WAIT for w in joining):
                self.coverage["a dropped worker joins again"] += 1
            for come in ([], *([w] for w in joining)):
                for go in ([], *([w] for w in leaving)):
                    members = [m for m in (*newest.members, *come) if m not in go]
                    if members and (come or go):
                        yield from self._write_generation(s, PLANNED, members)

    @staticmethod
    def _joinable(s: State, inside: Iterable[int]) -> list[int]:
        return [
            w
            for w, worker in enumerate(s.workers)
            if worker.phase not in GONE and w not in inside and not s.leaving >> w & 1
        ]

    def _loss(self, s: State, lost: set[int]) -> Iterator[tuple[str, State]]:
        newest = s.gens[-1]
        pending = newest.kind == PLANNED and newest.number > s.in_force
        # A worker that came with a pending record is no survivor: it is unknown whether it has the state.
        members = [
            m
            for m, since in zip(newest.members, newest.since, strict=True)
            if m not in lost and not (pending and since == newest.number)
        ]
        base = next((g for g in s.gens if g.number == s.in_force), newest)
        if self.rules.base_holds and pending and not members and base is not newest:
            stuck = [m for m in base.members if s.workers[m].phase == FAILED and m not in newest.members]
            came = [m for m in self.newcomers(newest) if m not in lost]
            if stuck and (came or self.rules.base_holds == "always"):
                yield from self._write_generation(s, FAILOVER, stuck + came, base)
                return
        joining: list[int] = []
        if len(members) < self.setup.minimum:
            joining = self._joinable(s, {*members, *lost})
            members += joining
        if len(members) >= self.setup.minimum and members:
            yield from self._write_generation(s, FAILOVER, members, joining=joining)

    def _write_generation(
        self,
        s: State,
        kind: str,
        members: list[int],
        base: Gen | None = None,
        joining: Iterable[int] = (),
    ) -> Iterator[tuple[str, State]]:
        newest = s.gens[-1]
        number = newest.number + 1
        since, holder = [], []
        for m in members:
            if m in newest.members and m not in joining:
                i = newest.members.index(m)
                since.append(newest.since[i])
                holder.append(
                    newest.holder[i]
                    or bool(s.reported >> m & 1)
                    or (self.rules.holder_by_carrying_over and newest.number > newest.since[i])
                )
            else:
                stays = base is not None and m in base.members
                since.append(base.since[base.members.index(m)] if base is not None and stays else number)
                knew = self.rules.holder_by_any_commit and _name_of(s.workers[m].chain) > StateName()
                holder.append(stays or knew)
        begin_anew = self.rules.first_commit_known_by_report and newest.number == 1 and not s.reported
        if not any(holder) and self.rules.holder_required and not begin_anew:
            return
        order = sorted(range(len(members)), key=lambda i: (not holder[i], since[i], members[i]))
        gen = Gen(
            number,
            kind,
            tuple(members[i] for i in order),
            tuple(since[i] for i in order),
            tuple(holder[i] for i in order),
            (0,) * len(members),
            (0.0,) * len(members),
            (None,) * len(members),
        )
        reported = s.reported & sum(1 << m for m in members)
        in_force = number if kind == FAILOVER and not self.rules.planned_needs_in_force else s.in_force
        names = "".join(NAMES[m] for m in gen.members)
        yield (
            f"leader writes {kind} {number} = {names}",
            s._replace(gens=(*s.gens, gen), reported=reported, in_force=in_force),
        )

    def fault_events(self, s: State) -> Iterator[tuple[str, State]]:
        if s.kills:
            for w, worker in enumerate(s.workers):
                if worker.phase not in (LEFT, DEAD):
                    yield f"{NAMES[w]} dies", self._set(s, w, Worker(DEAD))._replace(kills=s.kills - 1)

    # -- all of it

    def successors(self, s: State) -> Iterator[tuple[str, State, bool]]:
        """(label, state, is a fault). Nothing follows `closing`: a worker that waits ends."""
        if s.closing:
            return
        if self.setup.stop_at_end and any(worker.phase == ENDED for worker in s.workers):
            yield "the rest of the end is not explored", s._replace(closing=True), False
            return
        if self.setup.eager:
            for w in range(len(s.workers)):
                if self._only_awaited(s, w):
                    for label, after in self.worker_events(s, w):
                        yield label, self.reduced(after), False
                    return
        for w in range(len(s.workers)):
            for label, after in self.worker_events(s, w):
                yield label, self.reduced(after), False
        for label, after in self.leader_events(s):
            yield label, self.reduced(after), label.endswith("wrongly")
        for label, after in self.fault_events(s):
            if label:
                yield label, self.reduced(after), True

    def _only_awaited(self, s: State, w: int) -> bool:
        """Whether the one event that `w` has, beside dying, commutes with all others and so may go first: to
        enter a generation that others wait for it in, or to see an exchange end that owes no lines."""
        worker, newest = s.workers[w], s.gens[-1]
        if newest.kind == FAILOVER and newest.number > worker.gen and w in newest.members:
            if worker.phase in (READY, FAILED):
                return True
            # no rank contributes to the old generation any more
            return worker.phase == CONTRIBUTED and min(self.gen_of(s, worker.gen).counts) <= worker.round
        if worker.phase != CONTRIBUTED or worker.round != 0 or newest.number > worker.gen:
            return False
        gen = self.gen_of(s, worker.gen)
        return min(gen.counts) > 0 and not self.rules.entered(
            _histories[worker.history], NAMES[w], self.roster(gen)
        )

    @staticmethod
    def reduced(s: State) -> State:
        """Forget what no rank can read any more."""
        wanted = {s.gens[-1].number}
        early = set()
        for worker in s.workers:
            if worker.phase in GONE:
                continue
            wanted.add(worker.gen)
            if worker.built > worker.gen:
                wanted.add(worker.built)
            if worker.round <= 1:
                early.add(worker.gen)
        gens = []
        for g in s.gens:
            if g.number not in wanted:
                continue
            if g.number not in early and max(g.counts) > 1:  # then all have exchanged their names
                g = g._replace(known=(None,) * len(g.members))
            gens.append(g)
        return s._replace(gens=tuple(gens))

    def check(self, s: State) -> None:
        by_name: dict[StateName, Chain] = {}
        newest = s.gens[-1]
        steps_of: dict[int, list[int]] = {}
        for w, worker in enumerate(s.workers):
            if worker.phase in GONE or worker.chain[0] == DIRTY:
                continue
            name = _name_of(worker.chain)
            if name.is_none:
                if worker.round > 1 and worker.phase == CONTRIBUTED:
                    raise Violation("I3: a reduction on unequal initial parameters")
                continue
            if by_name.setdefault(name, worker.chain) != worker.chain:
                raise Violation(f"I3: two states are called {name}")
            if worker.gen and worker.round >= 1:
                gen = self.gen_of(s, worker.gen)
                if not self.must_copy(gen, w, worker):
                    steps_of.setdefault(worker.gen, []).append(name.step)
            if w in newest.members:
                i = newest.members.index(w)
                if newest.holder[i] and name.generation >= newest.since[i]:
                    for step_id, _ in s.ledger:
                        if step_id not in worker.chain:
                            raise Violation(
                                f"I1: {NAMES[w]}, a holder, does not have step {_steps[step_id].step} of "
                                f"generation {_steps[step_id].generation}, which is in the ledger"
                            )
        for steps in steps_of.values():
            if max(steps) - min(steps) > 1:
                raise Violation(f"I4: members of one generation are at steps {steps}")

    def check_stuck(self, s: State) -> None:
        """`s` has no successor but faults."""
        newest = s.gens[-1]
        if s.closing:
            ended = next(worker for worker in s.workers if worker.phase == ENDED)
            self._check_nothing_lost(s, ended.chain, "the job ended")
            self.coverage["the job ended"] += 1
            return
        alive = [w for w, worker in enumerate(s.workers) if worker.phase not in GONE]
        if not alive:
            self.coverage["everyone is gone"] += 1
            return
        holders = {m for m, h in zip(newest.members, newest.holder, strict=True) if h or s.reported >> m & 1}
        if holders & set(alive):
            present = len([m for m in newest.members if s.workers[m].phase not in GONE])
            if present + len(self._joinable(s, newest.members)) >= self.setup.minimum:
                raise Violation("stuck: a holder is alive and nothing can happen")
            self.coverage["below the minimum"] += 1
            return
        self.coverage["no holder is known alive"] += 1


class Exploration(NamedTuple):
    """outcomes: what is left where nothing but faults can follow: the ledger, and who is how far."""

    states: int
    transitions: int
    coverage: Counter[str]
    outcomes: frozenset[object]


def explore(setup: Setup, limit: int = 2_000_000, prefix: Iterable[str] = ()) -> Exploration:
    """Visit every state reachable after the events of `prefix`.

    Raises Violation with the shortest history that leads to it.
    """
    collecting = gc.isenabled()
    gc.disable()  # states hold no cycles, and looking for some takes a fifth of the time
    try:
        return _explore(setup, limit, prefix)
    finally:
        if collecting:
            gc.enable()


def _explore(setup: Setup, limit: int, prefix: Iterable[str]) -> Exploration:
    model = Model(setup)
    start = model.initial()
    for label in prefix:
        possible = {text: after for text, after, _ in Model(replace(setup, eager=False)).successors(start)}
        start = possible[label]
    parents: dict[State, tuple[State, str] | None] = {start: None}
    queue = deque([start])
    transitions = 0
    outcomes: set[object] = set()
    while queue:
        s = queue.popleft()
        moved = False
        try:
            for label, after, is_fault in model.successors(s):
                transitions += 1
                moved = moved or not is_fault
                if after not in parents:
                    parents[after] = (s, label)
                    queue.append(after)
                    try:
                        model.check(after)
                    except Violation as violation:
                        raise Violation(f"{violation} after: {label}") from None
            if not moved:
                model.check_stuck(s)
                outcomes.add((s.ledger, tuple((w.phase, w.chain) for w in s.workers)))
        except Violation as violation:
            raise Violation("\n  ".join([str(violation), *history(parents, s)])) from None
        if len(parents) > limit:
            raise AssertionError(f"more than {limit} states: the search is not complete")
    return Exploration(len(parents), transitions, model.coverage, frozenset(outcomes))


def history(parents: Mapping[State, tuple[State, str] | None], s: State) -> list[str]:
    labels = []
    step = parents[s]
    while step is not None:
        labels.append(step[1])
        step = parents[step[0]]
    return labels[::-1]
