"""The protocol of docs/design/ as a transition system small enough to explore completely.

Owns the atomic events of up to four workers, a leader and the ledger, and the invariants I1 to I6, with allowed
sizes as well. The
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

from collections.abc import Iterable, Iterator

from model_state import (
    CONTRIBUTED,
    DEAD,
    DIRTY,
    ENDED,
    FAILED,
    FAILOVER,
    GONE,
    LEFT,
    NAMES,
    PLANNED,
    READY,
    WAIT,
    Chain,
    Gen,
    State,
    Violation,
    Worker,
    _name_of,
    _steps,
)
from model_workers import WorkerEvents

from bagua_agent.base.sizes import AllowedSizes, SizePolicy
from bagua_contract.records import StateName


class Model(WorkerEvents):
    """The transition system of a set-up: the leader's events, faults, all successors of a state, the invariants."""

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
                rest = [m for m in newest.members if m not in lost]
                yield from self._write_generation(s, PLANNED, rest[: self._fit(len(rest))])
        if s.in_force == newest.number or (not self.rules.planned_needs_in_force and newest.kind == FAILOVER):
            joining = self._joinable(s, newest.members)
            leaving = [w for w in newest.members if s.leaving >> w & 1]
            if any(s.workers[w].phase != WAIT for w in joining):
                self.coverage["a dropped worker joins again"] += 1
            for come in self._arrivals(len(newest.members), joining):
                for go in ([], *([w] for w in leaving)):
                    members = [m for m in (*newest.members, *come) if m not in go]
                    if members and (come or go):
                        yield from self._write_generation(s, PLANNED, members)

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
            for chosen, filling in self._of_allowed_size(s, members, lost):
                yield from self._write_generation(s, FAILOVER, chosen, joining=joining + filling)

    # -- allowed sizes

    def _fit(self, count: int) -> int:
        return AllowedSizes(len(NAMES), SizePolicy(self.setup.sizes)).fit(count)

    def _arrivals(self, count: int, joining: list[int]) -> Iterable[list[int]]:
        """Joiners of one planned generation: none or one; with sizes none or all that the next size takes."""
        if not self.setup.sizes:
            return ([], *([w] for w in joining))
        size = self._fit(count + len(joining))
        return ([], joining[: size - count]) if size > count else ([],)

    def _of_allowed_size(
        self, s: State, members: list[int], lost: set[int]
    ) -> Iterator[tuple[list[int], list[int]]]:
        """Survivors that stay and spares that join. Both ways where spares complete the next size: they may not be
        ready yet."""
        size = self._fit(len(members))
        if size == len(members) or not self.rules.loss_shrinks_to_a_size:
            yield members, []
            return
        spares = self._joinable(s, {*members, *lost})
        full = self._fit(len(members) + len(spares))
        if full > len(members):
            self.coverage["spares complete a size"] += 1
            filling = spares[: full - len(members)]
            yield members + filling, filling
        self.coverage["a survivor is left out"] += 1
        newest = s.gens[-1]
        # the state must remain; among its holders the youngest is left out
        holds = {m for m, h in zip(newest.members, newest.holder, strict=True) if h or s.reported >> m & 1}
        yield sorted(members, key=lambda m: m not in holds)[:size], []

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
        return min(gen.counts) > 0 and not self.due_when_entered(worker.history, w, gen)

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
                nothing = (None,) * len(g.members)
                if g.known != nothing:
                    g = g._replace(known=nothing)
            gens.append(g)
        kept = tuple(gens)
        return s if kept == s.gens else State(s.workers, kept, *s[2:])

    def check(self, s: State) -> None:
        by_name: dict[StateName, Chain] = {}
        newest = s.gens[-1]
        if self.setup.sizes and len(newest.members) not in self.setup.sizes:
            raise Violation(f"size: generation {newest.number} has {len(newest.members)} members")
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
