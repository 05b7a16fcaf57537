"""Rounds (docs/design/rounds.md) as a transition system, explored completely.

Owns a few workers between leases, closes and generations, with the real decisions: `LeaseBook` leases and commits,
`heal_plan.plan` says who copies. Checks R1 to R4. Membership is simplified: a generation of the survivors follows each
loss, and a planned one each join; how these records come about is model.py's. With `averages` the models have no
anchor: what each has learned is followed place by place, through averages in the background (R5).
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from bagua_contract.records import StateName
from bagua_core.communication.step_interface import Used
from bagua_core.data.rounds.leases import LeaseBook, Range, count_of, first_of
from bagua_core.elastic.heal import heal_plan

# phases of a worker
ENTERING, BETWEEN, OPEN, CLOSING, GONE, ENDED = range(6)
Ranges = tuple[Range, ...]


class Violation(AssertionError):
    pass


class Book(NamedTuple):
    """What a LeaseBook consists of here: all workers are equally fast."""

    epoch: int
    number: int
    unused: Ranges


class Worker(NamedTuple):
    """name: (generation, rounds) of its last commit, or (generation, 0) of its first entry; generation 0: it has no
    state of its own yet. rounds: those it
    has, each with the places that workers used. lease, used: of the round under way. done: places that it trained on.
    knows: places that its model has learned, its open round's included. sent: what an average
    under way has of it; mean: what has come back of the average, which it has not taken in yet.
    """

    phase: int = ENTERING
    generation: int = 0
    name: tuple[int, int] = (0, 0)
    book: Book | None = None
    rounds: tuple[frozenset[tuple[int, Ranges]], ...] = ()
    lease: Ranges = ()
    used: int = 0
    done: int = 0
    knows: frozenset[int] = frozenset()
    sent: frozenset[int] | None = None
    mean: frozenset[int] | None = None


class Generation(NamedTuple):
    """rows: what each member used in the newest close whose vote has completed; empty before the first. round: that
    close's. switches: all members agreed in it to enter the next generation. newcomers: members that copy the state
    beside round `first`, in which the generation was entered."""

    number: int
    members: tuple[int, ...]
    since: tuple[int, ...]
    rows: tuple[Ranges, ...] = ()
    round: int = -1
    switches: bool = False
    newcomers: tuple[int, ...] = ()
    first: int = 0


class State(NamedTuple):
    """generations: those in which a worker may still be, oldest first."""

    workers: tuple[Worker, ...]
    generations: tuple[Generation, ...]
    kills: int = 0
    joins: int = 0


@dataclass(frozen=True)
class Setup:
    """places: of the one epoch. most: of a round. early: a round may be closed at any time. averages: in the
    background, instead of one at each close. names_initial: workers that enter the job's first generation name the
    state that they have then. The rest are the rules that tests take away."""

    workers: int = 2
    places: int = 6
    most: int = 4
    kills: int = 0
    joins: int = 0
    early: bool = False
    averages: bool = False
    begins_at_commit: bool = True
    comes_in_at_commit: bool = True
    closes_before_lease: bool = True
    names_initial: bool = True
    undoes: bool = False


class Exploration(NamedTuple):
    states: int
    coverage: Counter[str]


def explore(setup: Setup, limit: int = 1_000_000) -> Exploration:
    """Visit every state. Raises Violation with the shortest history that leads to it."""
    model = Model(setup)
    start = model.initial()
    parents: dict[State, tuple[State, str] | None] = {start: None}
    queue = deque([start])
    while queue:
        s = queue.popleft()
        moved = False
        try:
            for label, after in model.successors(s):
                moved = moved or not label.startswith(("kill", "join"))
                if after not in parents:
                    parents[after] = (s, label)
                    queue.append(after)
                    model.check(after)
            if not moved:
                model.check_end(s)
        except Violation as violation:
            labels, at = [], s
            while (parent := parents[at]) is not None:
                labels.append(parent[1])
                at = parent[0]
            raise Violation("\n  ".join([str(violation), *labels[::-1]])) from None
        if len(parents) > limit:
            raise AssertionError(f"more than {limit} states: the search is not complete")
    return Exploration(len(parents), model.coverage)


class Model:
    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.coverage: Counter[str] = Counter()

    def initial(self) -> State:
        setup = self.setup
        everyone = tuple(range(setup.workers))
        book = Book(0, 0, ((0, setup.places),))
        workers = tuple(Worker(book=book) for _ in everyone)
        first = Generation(1, everyone, (1,) * setup.workers)
        return State(workers, (first,), kills=setup.kills, joins=setup.joins)

    # -- events

    def successors(self, s: State) -> Iterator[tuple[str, State]]:
        newest = s.generations[-1]
        for generation in s.generations:
            yield from self._collective(s, generation)
        for i, w in enumerate(s.workers):
            if w.phase == BETWEEN and w.generation == newest.number:
                yield f"{i} opens", self._opened(s, i)
            elif w.phase == BETWEEN:
                generation = self._of(s, w.generation)
                if not self._is_superseded(s, generation):
                    yield f"{i} opens beside a pending generation", self._opened(s, i)
                else:
                    yield f"{i} goes over", self._put(s, i, w._replace(phase=ENTERING))
            elif w.phase == OPEN:
                if w.used < count_of(w.lease):
                    yield f"{i} trains", self._put(s, i, self._trained(w))
                if w.used == count_of(w.lease) or (self.setup.early and w.used):
                    yield f"{i} closes", self._put(s, i, w._replace(phase=CLOSING))
            elif w.phase == CLOSING:
                yield from self._ends_close(s, i)
            if w.phase == OPEN and w.sent is None and self.setup.averages and not self.setup.begins_at_commit:
                yield f"{i} begins an average", self._put(s, i, w._replace(sent=w.knows))
            if w.phase in (OPEN, CLOSING) and w.mean is not None and not self.setup.comes_in_at_commit:
                yield f"{i} takes the average in", self._put(s, i, self._with_mean(w))
            if w.phase not in (GONE, ENDED) and s.kills and self._alive(s) > 1:
                yield f"kill {i}", self._killed(s, i)
        if s.joins and newest.number == max(w.generation for w in s.workers) and len(s.generations) == 1:
            yield "join", self._joined(s)

    def _trained(self, w: Worker) -> Worker:
        knows = w.knows
        if self.setup.averages:
            place = list(places_of(w.lease))[w.used]
            if place in knows:
                raise Violation(f"R5: a model learns place {place} again, which it has learned already")
            knows |= {place}
        return w._replace(used=w.used + 1, done=w.done + 1, knows=knows)

    @staticmethod
    def _with_mean(w: Worker) -> Worker:
        return w._replace(knows=w.knows | (w.mean or frozenset()), sent=None, mean=None)

    def _opened(self, s: State, i: int) -> State:
        w = s.workers[i]
        generation = self._of(s, w.generation)
        assert w.book is not None
        if w.book.epoch:
            self.coverage["the epoch ended"] += 1
            return self._put(s, i, w._replace(phase=ENDED))
        beside = generation.newcomers if w.name[1] == generation.first else ()
        active = [m for m in generation.members if m not in beside]
        leases = self._real(w.book).lease([str(m) for m in active], self.setup.most)
        lease = leases[active.index(i)] if i in active else ()
        return self._put(s, i, w._replace(phase=OPEN, lease=lease, used=0))

    def _collective(self, s: State, g: Generation) -> Iterator[tuple[str, State]]:
        members = [s.workers[m] for m in g.members]
        if all(w.phase == ENTERING for w in members) and g is s.generations[-1]:
            yield f"all enter {g.number}", self._entered(s, g)
        sent = [w.sent for w in members if w.sent is not None and w.mean is None and w.generation == g.number]
        if len(sent) == len(members) > 1 and GONE not in {w.phase for w in members}:
            self.coverage["an average completed"] += 1
            mean = frozenset().union(*sent)
            workers = tuple(w._replace(mean=mean) if i in g.members else w for i, w in enumerate(s.workers))
            yield f"an average of {g.number} completes", s._replace(workers=workers)
        here = all(w.phase == CLOSING and w.generation == g.number for w in members)
        rounds = {w.name[1] for w in members}
        if here and len(rounds) == 1 and g.round not in rounds:
            rows = tuple(first_of(w.lease, w.used) for w in members)
            switches = g is not s.generations[-1] and not self._is_superseded(s, g)
            yield (
                f"the vote of {g.number} completes",
                self._put_generation(s, g._replace(rows=rows, round=rounds.pop(), switches=switches)),
            )

    def _ends_close(self, s: State, i: int) -> Iterator[tuple[str, State]]:
        w = s.workers[i]
        g = self._of(s, w.generation)
        completed = g.round == w.name[1]
        if completed:
            begins = (
                self.setup.averages and self.setup.begins_at_commit and (w.sent is None or w.mean is not None)
            )
            for sends in (False, True)[: 1 + begins]:
                yield f"{i} commits" + " and sends" * sends, self._committed(s, i, g, sends)
        if self._is_superseded(s, g):
            self.coverage["a close failed"] += 1
            if completed:
                self.coverage["a vote was missed"] += 1
            kept = w._replace(phase=ENTERING)
            if self.setup.undoes:
                kept = kept._replace(used=0, lease=())
            yield f"{i} keeps its steps", self._put(s, i, kept)

    def _committed(self, s: State, i: int, g: Generation, sends: bool) -> State:
        w = s.workers[i]
        assert w.book is not None
        book = self._closed(w.book, g)
        name = (g.number, w.name[1] + 1)
        rounds = (*w.rounds, frozenset(zip(g.members, g.rows, strict=True)))
        phase = ENTERING if g.switches else BETWEEN
        if w.mean is not None:
            w = self._with_mean(w)
        if sends:
            w = w._replace(sent=w.knows)
        return self._put(s, i, w._replace(phase=phase, name=name, book=book, rounds=rounds, lease=(), used=0))

    def _entered(self, s: State, g: Generation) -> State:
        """Exchange names, copy, and close first where a holder keeps local steps."""
        members = [s.workers[m] for m in g.members]
        names = [StateName(*w.name, 0) for w in members]
        plan = heal_plan.plan(names, [False] * len(members), list(g.since))
        source = members[plan.holders[0]]
        is_open = any(members[r].used for r in plan.holders)
        for rank, m in enumerate(g.members):
            w = members[rank]
            if rank in plan.healing:
                if w.used:
                    self.coverage["one that missed the vote copied the round"] += 1
                name = (0, source.name[1]) if rank in plan.newcomers else source.name
                knows = source.knows - set(places_of(first_of(source.lease, source.used)))
                w = w._replace(
                    name=name, book=source.book, rounds=source.rounds, lease=(), used=0, knows=knows
                )
            if plan.initial and self.setup.names_initial:
                w = w._replace(name=(g.number, 0))
            phase = CLOSING if is_open and self.setup.closes_before_lease else BETWEEN
            if is_open and not w.used:
                self.coverage["closed without steps of its own"] += 1
            if w.sent is not None:
                self.coverage["an average was dropped"] += w.mean is None
            s = self._put(s, m, w._replace(phase=phase, generation=g.number, sent=None, mean=None))
        newcomers = tuple(g.members[rank] for rank in sorted(plan.newcomers))
        return s._replace(generations=(g._replace(newcomers=newcomers, first=source.name[1]),))

    def _killed(self, s: State, i: int) -> State:
        s = self._put(s, i, s.workers[i]._replace(phase=GONE))
        newest = s.generations[-1]
        known = {m: since for g in s.generations for m, since in zip(g.members, g.since, strict=True)}
        alive = tuple(m for m in known if self._survives(s, m))
        s = s._replace(kills=s.kills - 1)
        if not alive:
            return s
        # one that has no state yet is not a survivor: it joins again
        lost = {m for m in known if s.workers[m].phase not in (GONE, ENDED)} - set(alive)
        for m in lost:
            s = self._put(s, m, s.workers[m]._replace(phase=GONE))
        number = newest.number + 1
        since = tuple(known[m] for m in alive)
        return s._replace(
            generations=(*s.generations, Generation(number, alive, since)), joins=s.joins + len(lost)
        )

    def _joined(self, s: State) -> State:
        newest = s.generations[-1]
        number, joiner = newest.number + 1, len(s.workers)
        members = tuple(m for m in newest.members if s.workers[m].phase not in (GONE, ENDED))
        if members != newest.members:
            return s._replace(joins=0)
        planned = Generation(number, (*members, joiner), (*newest.since, number))
        return s._replace(
            workers=(*s.workers, Worker()), generations=(*s.generations, planned), joins=s.joins - 1
        )

    # -- parts

    def _is_superseded(self, s: State, g: Generation) -> bool:
        """A member of it is gone: its collectives break."""
        return any(s.workers[m].phase == GONE for m in g.members)

    def _of(self, s: State, number: int) -> Generation:
        return next(g for g in s.generations if g.number == number)

    def _alive(self, s: State) -> int:
        return sum(self._survives(s, m) for m in range(len(s.workers)))

    def _survives(self, s: State, m: int) -> bool:
        """One of the job's first workers does also while it has no state yet: it joined before any was committed."""
        w = s.workers[m]
        return w.phase not in (GONE, ENDED) and bool(w.name[0] or m < self.setup.workers)

    def _real(self, book: Book) -> LeaseBook:
        return LeaseBook(self.setup.places, book.epoch, book.number, book.unused)

    def _closed(self, book: Book, g: Generation) -> Book:
        try:
            after = self._real(book).closed([str(m) for m in g.members], [Used(ranges) for ranges in g.rows])
        except RuntimeError as conflict:
            raise Violation(f"R1: {conflict}") from None
        return Book(after.epoch, after.number, after.unused)

    @staticmethod
    def _put(s: State, i: int, w: Worker) -> State:
        return s._replace(workers=(*s.workers[:i], w, *s.workers[i + 1 :]))

    @staticmethod
    def _put_generation(s: State, g: Generation) -> State:
        return s._replace(generations=tuple(g if x.number == g.number else x for x in s.generations))

    # -- invariants

    def check(self, s: State) -> None:
        states: dict[tuple[int, int], tuple[Book | None, object]] = {}
        for i, w in enumerate(s.workers):
            if w.phase == GONE or not w.generation or not (w.name[0] or i < self.setup.workers):
                continue
            places = [p for each in w.rounds for _, ranges in each for p in places_of(ranges)]
            if len(places) != len(set(places)):
                raise Violation(f"R1: worker {i} has places that were used twice: {w.rounds}")
            if states.setdefault(w.name, (w.book, w.rounds)) != (w.book, w.rounds):
                raise Violation(f"R2: workers of name {w.name} have different states")
            own = [p for each in w.rounds for m, ranges in each if m == i for p in places_of(ranges)]
            committed = set(places) | set(places_of(first_of(w.lease, w.used)))
            if w.knows - committed:
                raise Violation(
                    f"R5: {i}'s model has {w.knows - committed}, which others used in no round of its own"
                )
            kept = len(own) + w.used
            if kept != w.done:
                raise Violation(f"R3: of {w.done} local steps of {i} only {kept} are in a round")
        for g in s.generations:
            rounds = {s.workers[m].name[1] for m in g.members if s.workers[m].generation == g.number}
            if rounds and max(rounds) - min(rounds) > 1:
                raise Violation(f"R4: members of generation {g.number} are {sorted(rounds)} rounds far")

    def check_end(self, s: State) -> None:
        left = [i for i, w in enumerate(s.workers) if w.phase not in (GONE, ENDED) and w.name[0]]
        if left:
            raise Violation(f"workers {left} wait for ever")
        for w in s.workers:
            used = sum(count_of(ranges) for each in w.rounds for _, ranges in each)
            if w.phase == ENDED and used != self.setup.places:
                raise Violation(f"R1: the epoch ended with {used} of {self.setup.places} places used")
        self.coverage["all ended"] += 1


def places_of(ranges: Ranges) -> Iterator[int]:
    for start, stop in ranges:
        yield from range(start, stop)
