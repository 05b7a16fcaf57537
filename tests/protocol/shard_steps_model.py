"""Steps of replicas of two workers over generations, explored completely: I1 to I6 of docs/design/steps.md by shards.

Owns a few replicas between exchanges, votes, agreements and copies; each shard has its own name, state and history, and
learns by itself how a vote or a copy has ended. The decisions are the real ones: `of_replica` and `heal_plan.plan` say
who copies, `History` which lines of the ledger are due. A replica is lost as a whole, as its agents make it.

Left out: how records come about (replica_model.py: a failover generation of the survivors follows each loss, a planned
one each join), the order of a step's three parts (test_replica_steps.py), and the collectives of the end (model.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from exploring import Exploration, Violation, with_value
from exploring import explore as explore_model

from bagua_contract.records import StateName
from bagua_core.elastic.heal import heal_plan
from bagua_core.elastic.membership.entry import Info, of_replica
from bagua_core.elastic.state.commit_history import Entry, History, Line

SIZE = 2
NAMES = "abcd"
NONE = StateName()

# phases of a replica
ENTERING, COPYING, READY, VOTING, GONE = range(5)
# what a shard knows of the vote
UNKNOWN, DONE, FAILED = range(3)


class Shard(NamedTuple):
    """steps: the entries that made its state. has_state: also before the first step. vote: what it knows of the one
    under way. copied: it has its copy, which it has not swapped in."""

    steps: tuple[Entry, ...] = ()
    has_state: bool = False
    history: History = History()
    vote: int = UNKNOWN
    copied: bool = False

    @property
    def name(self) -> StateName:
        if not self.has_state:
            return NONE
        return StateName(self.steps[-1].generation if self.steps else 1, len(self.steps), 0)


class Replica(NamedTuple):
    phase: int = ENTERING
    generation: int = 0
    shards: tuple[Shard, ...] = (Shard(),) * SIZE


class Generation(NamedTuple):
    """since: by member. steps: of the state with which it was entered. source: the replica that others copy. newcomers:
    copy beside step `steps`. voted: step whose vote has completed; -1: none. switches: in it all agreed to go on in the
    next generation."""

    number: int
    members: tuple[int, ...]
    since: tuple[int, ...]
    steps: int = 0
    source: int = 0
    newcomers: tuple[int, ...] = ()
    voted: int = -1
    switches: bool = False


class State(NamedTuple):
    """generations: in which a replica may still be, oldest first. ledger: lines that shards 0 have written."""

    replicas: tuple[Replica, ...]
    generations: tuple[Generation, ...]
    ledger: frozenset[Line] = frozenset()
    kills: int = 0
    joins: int = 0
    over: bool = False


@dataclass(frozen=True)
class Setup:
    """steps: of the job. row: of a replica, from its shards' rows. The rest are rules that tests take away: agrees: the
    shards of a replica commit together or not at all. copies_jointly: they swap copies in so too."""

    replicas: int = 2
    steps: int = 2
    kills: int = 0
    joins: int = 0
    row: Callable[[Sequence[Info], Sequence[int]], Info] = of_replica
    agrees: bool = True
    copies_jointly: bool = True


class Model:
    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.coverage: Counter[str] = Counter()

    def initial(self) -> State:
        setup = self.setup
        began = Replica(READY, 1, (Shard(has_state=True),) * SIZE)
        members = tuple(range(setup.replicas))
        first = Generation(1, members, (1,) * setup.replicas)
        return State((began,) * setup.replicas, (first,), kills=setup.kills, joins=setup.joins)

    def successors(self, s: State) -> Iterator[tuple[str, State, bool]]:
        """(what happens, the state after it, whether it is a fault). Raises Violation."""
        self.check(s)
        if s.over:
            return
        newest = s.generations[-1]
        if all(s.replicas[m].phase == ENTERING for m in newest.members):
            yield f"all enter {newest.number}", self._entered(s, newest), False
        for g in s.generations:
            voting = [s.replicas[m] for m in g.members]
            steps = {self._steps(g, m, r) for m, r in zip(g.members, voting, strict=True)}
            here = all(r.phase == VOTING and r.generation == g.number for r in voting)
            if here and len(steps) == 1 and g.voted not in steps:
                done = g._replace(voted=steps.pop(), switches=g is not newest and not self._is_broken(s, g))
                yield f"the vote of {g.number} completes", self._with_generation(s, done), False
        for number, replica in enumerate(s.replicas):
            for label, after in self._replica_events(s, number, replica):
                yield f"{NAMES[number]} {label}", after, False
            if s.kills and replica.phase != GONE:
                yield f"{NAMES[number]} is lost", self._lost(s, number), True
        # A switch needs one more vote
        in_time = len(s.generations) == 1 and newest.voted < self.setup.steps - 1
        if s.joins and in_time and not self._is_broken(s, newest):
            yield "another replica joins", self._joined(s, newest), True

    # -- a replica

    def _replica_events(self, s: State, me: int, replica: Replica) -> Iterator[tuple[str, State]]:
        if replica.phase in (GONE, ENTERING):
            return
        g = next(each for each in s.generations if each.number == replica.generation)
        broken = self._is_broken(s, g)
        if replica.phase == READY:
            if self._steps(g, me, replica) < self.setup.steps:
                yield "contributes", self._put(s, me, replica._replace(phase=VOTING))
            if broken:
                yield "enters the next generation", self._put(s, me, replica._replace(phase=ENTERING))
        if replica.phase == COPYING:
            yield from self._copies(s, me, replica, g, broken)
        if replica.phase != VOTING:
            return
        step = self._steps(g, me, replica)
        completed, copies = g.voted == step, me in self._healing(g, step)
        for place, shard in enumerate(replica.shards):
            if shard.vote != UNKNOWN:
                continue
            if completed and not copies:
                yield f"{place} learns the vote", self._with_shard(s, me, place, shard._replace(vote=DONE))
            elif completed and s.replicas[g.source].phase != GONE:
                after = self._with_copy(s, g, me, place, DONE)
                yield f"{place} learns the vote and swaps its copy in", after
            if broken:
                self.coverage["a vote was missed"] += completed
                yield f"{place} fails", self._with_shard(s, me, place, shard._replace(vote=FAILED))
        if all(shard.vote != UNKNOWN for shard in replica.shards):
            yield "'s shards agree", self._agreed(s, me, replica, g)

    def _agreed(self, s: State, me: int, replica: Replica, g: Generation) -> State:
        done = all(shard.vote == DONE for shard in replica.shards)
        if not done and any(shard.vote == DONE for shard in replica.shards):
            self.coverage["one shard alone knew of the vote"] += 1
            if me in g.newcomers:
                self.coverage["one shard alone had its copy"] += 1
        shards, ledger = list(replica.shards), s.ledger
        for place, shard in enumerate(shards):
            commits = done if self.setup.agrees else shard.vote == DONE
            if commits:
                history, due = self._released(shard, g, place, me)
                ledger |= set(due) if place == 0 else set()
                entry = self._entry(g, len(shard.steps), place)
                shard = shard._replace(steps=(*shard.steps, entry), history=history.committed(entry))
            shards[place] = shard._replace(vote=UNKNOWN)
        if done:
            self.coverage["committed"] += 1
        phase = READY if done and not g.switches else ENTERING
        after = self._put(s, me, replica._replace(phase=phase, shards=tuple(shards)))._replace(ledger=ledger)
        return after

    def _copies(
        self, s: State, me: int, replica: Replica, g: Generation, broken: bool
    ) -> Iterator[tuple[str, State]]:
        """Each shard from the one with its rank. Both swap their copies in when both have them."""
        for place, shard in enumerate(replica.shards):
            if shard.copied or s.replicas[g.source].phase == GONE:
                continue
            if self.setup.copies_jointly:
                after = self._with_shard(s, me, place, shard._replace(copied=True))
            else:
                after = self._with_copy(s, g, me, place, UNKNOWN)
                after = self._with_shard(
                    after, me, place, after.replicas[me].shards[place]._replace(copied=True)
                )
            yield f"{place} has its copy", after
        if all(shard.copied for shard in replica.shards):
            self.coverage["copied at once"] += 1
            after = s
            for place in range(SIZE):
                # what was sent is the source's state at this boundary, which it does not leave before
                after = self._with_copy(after, g, me, place, UNKNOWN)
            yield "swaps its copies in", self._put(after, me, after.replicas[me]._replace(phase=READY))
        if broken:
            self.coverage["one shard alone was copied"] += sum(shard.copied for shard in replica.shards) == 1
            shards = tuple(shard._replace(copied=False) for shard in replica.shards)
            yield "gives its copies up", self._put(s, me, replica._replace(phase=ENTERING, shards=shards))

    def _with_copy(self, s: State, g: Generation, me: int, place: int, vote: int) -> State:
        """The shard has the source's state as the generation was entered; shard 0 writes what is due by it."""
        source = s.replicas[g.source].shards[place]
        history = History(tuple(k for k in source.history.kept if k.entry.step <= g.steps))
        history, due = history.copied(f"{NAMES[me]}{place}", self._roster(g, place))
        s = s._replace(ledger=s.ledger | set(due)) if place == 0 else s
        return self._with_shard(s, me, place, Shard(source.steps[: g.steps], True, history, vote))

    def _released(self, shard: Shard, g: Generation, place: int, me: int) -> tuple[History, tuple[Line, ...]]:
        healing = frozenset(g.members.index(m) for m in self._healing(g, len(shard.steps)))
        own = f"{NAMES[me]}{place}"
        return shard.history.collective_completed(len(shard.steps) + 1, healing, own, self._roster(g, place))

    def _entry(self, g: Generation, step: int, place: int) -> Entry:
        healing = frozenset(g.members.index(m) for m in self._healing(g, step))
        return Entry(g.number, step + 1, (("batch", step),), self._roster(g, place), healing)

    # -- generations

    def _entered(self, s: State, g: Generation) -> State:
        infos = []
        for m, since in zip(g.members, g.since, strict=True):
            rows = [Info(shard.name, False, {"epoch": 0, "batch": 0}) for shard in s.replicas[m].shards]
            infos.append(self.setup.row(rows, [since] * SIZE))
        plan = heal_plan.plan([i.name for i in infos], [False] * len(infos), list(g.since))
        if plan.initial:
            raise Violation(f"I6: no replica of generation {g.number} has the state")
        source = g.members[plan.holders[0]]
        furthest = max(shard.name for shard in s.replicas[source].shards)
        ledger = {line.entry for line in s.ledger}
        for rank in plan.holders:
            for place, shard in enumerate(s.replicas[g.members[rank]].shards):
                if shard.name != furthest:
                    raise Violation(f"I3: shards of a holder of generation {g.number} have different names")
                if {e.step for e in ledger} - {e.step for e in shard.steps}:
                    raise Violation(f"I1: shard {place} of a holder lacks a step of the ledger")
        for rank, m in enumerate(g.members):
            if s.replicas[m].generation >= g.number:
                raise Violation(f"I5: {NAMES[m]} enters {g.number} from {s.replicas[m].generation}")
            phase = COPYING if rank in plan.at_once else READY
            s = self._put(s, m, s.replicas[m]._replace(phase=phase, generation=g.number))
        # a copied state's lines, and those of replicas that are gone, of steps that are with all
        for m in g.members:
            if g.members.index(m) in plan.holders:
                roster = tuple(f"{NAMES[n]}0" for n in g.members)
                s = s._replace(
                    ledger=s.ledger | set(s.replicas[m].shards[0].history.entered(f"{NAMES[m]}0", roster))
                )
        newcomers = tuple(g.members[rank] for rank in sorted(plan.beside))
        entered = g._replace(steps=furthest.step, source=source, newcomers=newcomers)
        return s._replace(generations=(entered,))

    def _lost(self, s: State, me: int) -> State:
        s = self._put(s, me, s.replicas[me]._replace(phase=GONE))._replace(kills=s.kills - 1)
        known = {m: since for g in s.generations for m, since in zip(g.members, g.since, strict=True)}
        joining = {
            m for m in known if all(shard.name.generation < known[m] for shard in s.replicas[m].shards)
        }
        alive = tuple(m for m in known if s.replicas[m].phase != GONE and m not in joining)
        for m in joining:  # a joiner that has committed nothing is no survivor: it would join again
            s = self._put(s, m, s.replicas[m]._replace(phase=GONE))
        if not alive:
            self.coverage["the last replica was lost"] += 1
            return s._replace(over=True)
        number = s.generations[-1].number + 1
        failover = Generation(number, alive, tuple(known[m] for m in alive))
        return s._replace(generations=(*s.generations, failover))

    def _joined(self, s: State, newest: Generation) -> State:
        number, joiner = newest.number + 1, len(s.replicas)
        planned = Generation(number, (*newest.members, joiner), (*newest.since, number))
        return s._replace(
            replicas=(*s.replicas, Replica()), generations=(*s.generations, planned), joins=s.joins - 1
        )

    # -- parts

    def _steps(self, g: Generation, me: int, replica: Replica) -> int:
        """Committed before the step under way; a newcomer takes part in the first one without them."""
        own = len(replica.shards[0].steps)
        return max(own, g.steps) if me in g.newcomers else own

    @staticmethod
    def _roster(g: Generation, place: int) -> tuple[str, ...]:
        return tuple(f"{NAMES[m]}{place}" for m in g.members)

    def _healing(self, g: Generation, step: int) -> tuple[int, ...]:
        return g.newcomers if step == g.steps else ()

    def _is_broken(self, s: State, g: Generation) -> bool:
        return any(s.replicas[m].phase == GONE for m in g.members)

    def _put(self, s: State, me: int, replica: Replica) -> State:
        return s._replace(replicas=with_value(s.replicas, me, replica))

    def _with_shard(self, s: State, me: int, place: int, shard: Shard) -> State:
        replica = s.replicas[me]
        return self._put(s, me, replica._replace(shards=with_value(replica.shards, place, shard)))

    @staticmethod
    def _with_generation(s: State, g: Generation) -> State:
        return s._replace(generations=tuple(g if x.number == g.number else x for x in s.generations))

    # -- invariants

    def check_stuck(self, s: State) -> None:
        """`s` has no successor but faults."""
        if s.over:
            return
        g = s.generations[-1]
        # one that joins behind the last step has no step to take part in
        members = [r for r in s.replicas if r.phase != GONE and r.shards[0].has_state]
        if any(len(shard.steps) < self.setup.steps for r in members for shard in r.shards):
            raise Violation(f"stuck in generation {g.number}: a replica has not all steps")
        shard = members[0].shards[0]
        # of the others the lines are due in the collectives of the end
        released = max((at for at, entry in enumerate(shard.steps) if not entry.healing), default=0)
        for entry in shard.steps[:released]:
            for rank in set(range(entry.world_size)) - entry.healing:
                if Line(entry, rank) not in s.ledger:
                    raise Violation(f"I2: the ledger lacks rank {rank} of step {entry.step}")
        self.coverage["all steps were taken"] += 1

    def check(self, s: State) -> None:
        known: dict[tuple[StateName, int], object] = {}
        by_step: dict[int, Entry] = {}
        for line in s.ledger:
            if by_step.setdefault(line.entry.step, line.entry) != line.entry:
                raise Violation(f"I1: the samples of step {line.entry.step} are under two committed steps")
        for g in s.generations:
            here = [(m, s.replicas[m]) for m in g.members if s.replicas[m].generation == g.number]
            steps = {self._steps(g, m, r) for m, r in here if r.phase in (READY, VOTING)}
            if steps and max(steps) - min(steps) > 1:
                raise Violation(f"I4: members of generation {g.number} have taken {sorted(steps)} steps")
        for replica in s.replicas:
            if replica.phase == GONE:
                continue
            for place, shard in enumerate(replica.shards):
                if shard.has_state and known.setdefault((shard.name, place), shard.steps) != shard.steps:
                    raise Violation(f"I3: two states of shard {place} are called {shard.name}")
            names = {shard.name for shard in replica.shards}
            if replica.phase == READY and len(names) > 1:
                raise Violation(f"I3: shards of one replica begin a step with the states {names}")


def explore(setup: Setup) -> Exploration:
    """Visit every reachable state. Raises Violation with the shortest history that leads to it."""
    return explore_model(Model(setup))
