"""The way to the first step (ARCHITECTURE.md, "Before the loop") as a transition system, explored completely.

Owns workers on a few nodes, what their agents have seen, the record in the store, and the invariants B1 to B5. The
decisions are the real ones: `decision.decide` writes every record, `must_start_again` says whom an agent ends. An
agent sees records late and may miss some; its agent and the leader learn late what a worker does.

Left out: suspicions (a communicator that breaks though all live), leaves, and scaling. Joins to a job that trains end
with the pending record; their switch is model.py's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import NamedTuple

from bagua_agent.membership.actions import WriteGeneration, WriteResult
from bagua_agent.membership.formation import decision
from bagua_agent.membership.policy import Policy
from bagua_agent.membership.view import AgentView, Desired, Evidence, JobView, MemberView, Waiting
from bagua_agent.node.live_workers import must_start_again
from bagua_contract.records import Generation, Stage
from tests.protocol import exploring
from tests.protocol.exploring import Exploration, Violation, with_value

NOW_S = 1e6  # every window has passed
LONG_AGO = Evidence("a", waiting=Waiting.HOLDER, waiting_since_s=-NOW_S)
POLICY = Policy()
STAGES = (None, Stage.WAITING, Stage.PREPARING, Stage.LOOP)
STARTED, WAITING, PREPARING, LOOP = range(4)


class Worker(NamedTuple):
    """stage: as it is; told: as its key says. gathering: that it entered; answered: by a member of a job that trains.
    listed: the newest record with it that its agent has seen. committed: in this generation."""

    number: int = 0
    stage: int = STARTED
    told: int = STARTED
    gathering: int = 0
    answered: bool = False
    listed: int = 0
    committed: int = 0


class State(NamedTuple):
    """record, before: encoded; empty for none. seen: number of the newest record, by agent; -1: its host is lost.
    entered: the communicator of the record was built by all. newest_commit: of any worker so far."""

    workers: tuple[Worker, ...]
    seen: tuple[int, ...]
    record: bytes = b""
    before: bytes = b""
    entered: bool = False
    newest_commit: int = 0
    kills: int = 0
    losses: int = 0
    misses: int = 0
    ended: bool = False


@dataclass(frozen=True)
class Setup:
    """slots: of each node. misses: how often the leader writes a record before all agents have seen the one before,
    which those then miss; without a bound a cohort that always misses one starts again without end.
    asks: whether workers ask before the loop, by slot of all nodes; None: all."""

    slots: tuple[int, ...]
    kills: int = 0
    losses: int = 0
    misses: int = 0
    minimum: int = 1
    checkpoints: bool = False
    asks: tuple[bool, ...] | None = None
    starts_again: Callable[..., bool] = must_start_again
    changed: Callable[[Generation, JobView], Generation] = lambda record, view: record


@cache
def decoded(record: bytes) -> Generation | None:
    return Generation.decode(record) if record else None


class Model:
    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.places = [(agent, slot) for agent, slots in enumerate(setup.slots) for slot in range(slots)]
        self.coverage: Counter[str] = Counter()
        self._decisions: dict[object, WriteGeneration | WriteResult | None] = {}

    def initial(self) -> State:
        setup = self.setup
        return State(
            (Worker(),) * len(self.places),
            (0,) * len(setup.slots),
            kills=setup.kills,
            losses=setup.losses,
            misses=setup.misses,
        )

    def id_of(self, place: int, worker: Worker) -> str:
        agent, slot = self.places[place]
        return f"{'abc'[agent]}.{slot}.{worker.number}"

    def is_there(self, s: State, place: int) -> bool:
        return s.seen[self.places[place][0]] >= 0

    def members(self, s: State, record: Generation) -> list[tuple[int, Worker]] | None:
        """The places of a record's members; None if one of them is gone."""
        ids = {self.id_of(i, w): (i, w) for i, w in enumerate(s.workers) if self.is_there(s, i)}
        found = [ids.get(m.worker_id) for m in record.members]
        return None if None in found else [f for f in found if f is not None]

    # -- the leader

    def view(self, s: State) -> JobView:
        agents = {
            name: AgentView(name, f"host-{name}", self.setup.slots[i], "", False, "h:1", i + 1)
            for i, name in enumerate("abc"[: len(self.setup.slots)])
            if s.seen[i] >= 0
        }
        members = {}
        for i, worker in enumerate(s.workers):
            stage = STAGES[worker.told]
            if stage is not None and self.is_there(s, i):
                worker_id, (agent, slot) = self.id_of(i, worker), self.places[i]
                print_ = {"model": "m"} if stage is Stage.LOOP else {}
                revision = 100 + i + 100 * worker.number
                members[worker_id] = MemberView(
                    worker_id, "abc"[agent], slot, "h:2", print_, worker.committed, revision, 0.0, stage
                )
        before = decoded(s.before)
        return JobView(
            generation=decoded(s.record),
            earlier=() if before is None else (before,),
            committed_generation=s.newest_commit,
            agents=agents,
            members=members,
            desired=Desired(self.setup.minimum, len(self.setup.slots)),
            has_checkpoints=self.setup.checkpoints,
        )

    def decision(self, s: State) -> WriteGeneration | WriteResult | None:
        key = (
            tuple((w.number, w.told, w.committed) for w in s.workers),
            tuple(n >= 0 for n in s.seen), s.record, s.before, s.newest_commit,
        )  # fmt: skip
        if key not in self._decisions:
            view = self.view(s)
            made = decision.decide(view, Evidence("a"), NOW_S, POLICY)
            if made.waiting is Waiting.HOLDER:
                made = decision.decide(view, LONG_AGO, NOW_S, POLICY)
            action = made.action
            assert action is None or isinstance(action, WriteGeneration | WriteResult), made
            if isinstance(action, WriteGeneration):
                action = replace(action, generation=self.setup.changed(action.generation, view))
            self._decisions[key] = action
        return self._decisions[key]

    def check_record(self, s: State, after: Generation) -> None:
        before = decoded(s.record)
        told = {self.id_of(i, w): w for i, w in enumerate(s.workers) if self.is_there(s, i)}
        if after.is_gathering:
            for agent in {m.agent_id for m in after.members}:
                if sum(m.agent_id == agent for m in after.members) != self.setup.slots["abc".index(agent)]:
                    raise Violation(f"B1: generation {after.number} lists a part of node {agent}")
            if any(told[m.worker_id].told == PREPARING for m in after.members):
                raise Violation(f"B1: generation {after.number} lists a worker that has left WAITING")
            if before is not None and not before.is_gathering:
                holds = [
                    m.worker_id
                    for m in before.members
                    if self._holds(told.get(m.worker_id), m.since_generation)
                ]
                if holds:
                    raise Violation(f"B3: generation {after.number} gathers though {holds} hold the state")
            if any(m.holder for m in after.members):
                raise Violation(f"B5: a worker of generation {after.number} counts as a holder")
        elif before is not None and before.is_gathering:
            if [m.worker_id for m in after.members] != [m.worker_id for m in before.members]:
                raise Violation(
                    f"B2: generation {after.number} has other workers or ranks than its gathering"
                )
            if after.base or any(m.holder for m in after.members):
                raise Violation(f"B5: generation {after.number} takes a gathering for training")

    @staticmethod
    def _holds(worker: Worker | None, since: int) -> bool:
        return worker is not None and worker.committed >= since

    # -- events

    def successors(self, s: State) -> Iterator[tuple[str, State, bool]]:
        """(what happens, the state after it, whether it is a fault)."""
        if s.ended:
            return
        record = decoded(s.record)
        action = self.decision(s)
        all_saw = record is None or not any(0 <= n < record.number for n in s.seen)
        if isinstance(action, WriteResult):
            yield f"leader: {action.reason}", s._replace(ended=True), False
        elif action is not None and (all_saw or s.misses):
            made = action.generation
            self.check_record(s, made)
            self._note(record, made)
            misses = s.misses - (not all_saw)
            after = s._replace(record=made.encode(), before=s.record, entered=False, misses=misses)
            ids = " ".join(m.worker_id for m in made.members)
            yield f"leader writes {made.kind.name} {made.number} = {ids or 'no workers'}", after, False
        for agent, seen in enumerate(s.seen):
            if record is not None and 0 <= seen < record.number:
                yield f"agent {'abc'[agent]} sees {record.number}", self._sees(s, agent, record), False
            if seen >= 0 and s.losses and sum(n >= 0 for n in s.seen) > 1:
                lost = s._replace(seen=with_value(s.seen, agent, -1), losses=s.losses - 1)
                yield f"host {'abc'[agent]} is lost", lost, True
        if record is not None and record.members and not s.entered:
            there = self.members(s, record)
            if there is not None and all(self._may_enter(s, record, i, w) for i, w in there):
                yield f"all build {record.number}", s._replace(entered=True), False
        for place, worker in enumerate(s.workers):
            if self.is_there(s, place):
                yield from self._worker_events(s, place, worker, record)

    def _may_enter(self, s: State, record: Generation, place: int, worker: Worker) -> bool:
        if s.seen[self.places[place][0]] != record.number:
            return False
        return worker.stage == LOOP or (record.is_gathering and worker.stage == WAITING)

    def _worker_events(
        self, s: State, place: int, worker: Worker, record: Generation | None
    ) -> Iterator[tuple[str, State, bool]]:
        me = self.id_of(place, worker)

        def becomes(**changes: object) -> State:
            changed = worker._replace(**changes)  # type: ignore[arg-type]
            return s._replace(workers=with_value(s.workers, place, changed))

        if s.kills:
            dead = s._replace(
                workers=with_value(s.workers, place, Worker(worker.number + 1)), kills=s.kills - 1
            )
            yield f"{me} dies", dead, True
        if worker.told != worker.stage:
            yield f"{me} tells {STAGES[worker.stage]}", self._tells(s, place, worker), False
            return  # a report goes on its way at once; what is late is that others act on it
        seen = s.seen[self.places[place][0]]
        listed = record is not None and record.placement_of(me) is not None
        if worker.stage == STARTED:
            asks = self.setup.asks is None or self.setup.asks[place]
            yield f"{me} begins", becomes(stage=WAITING if asks else LOOP), False
        if record is None:
            return
        if worker.stage == WAITING and record.is_gathering and listed and s.entered:
            if worker.answered:
                raise Violation(f"B4: {me} was answered and enters generation {record.number}")
            yield (
                f"{me} prepares in {record.number}",
                becomes(stage=PREPARING, gathering=record.number),
                False,
            )
        if worker.stage == WAITING and not record.is_gathering and seen == record.number:
            there = {
                self.id_of(i, w) for i, w in enumerate(s.workers) if self.is_there(s, i) and w.stage == LOOP
            }
            if any(m.worker_id in there for m in record.members):
                self.coverage["a late worker was answered"] += 1
                yield f"{me} is answered", becomes(stage=PREPARING, answered=True), False
        if worker.stage == PREPARING and worker.answered:
            yield f"{me} is at its first step", becomes(stage=LOOP), False
        if worker.stage == PREPARING and worker.gathering and self._passes_barrier(s, worker):
            yield f"{me} is at its first step", becomes(stage=LOOP), False
        if not record.is_gathering and listed and s.entered and worker.committed < record.number:
            self.coverage["committed"] += 1
            committed = becomes(committed=record.number)
            yield f"{me} commits in {record.number}", committed._replace(newest_commit=record.number), False

    def _passes_barrier(self, s: State, worker: Worker) -> bool:
        """The script's barrier before the loop is among all of the gathering that ask."""
        gathering = next(
            (
                g
                for g in (decoded(s.record), decoded(s.before))
                if g is not None and g.number == worker.gathering
            ),
            None,
        )
        if gathering is None:
            return False
        there = self.members(s, gathering)
        asking = (
            [] if there is None else [w for i, w in there if self.setup.asks is None or self.setup.asks[i]]
        )
        return bool(asking) and all(w.gathering == worker.gathering for w in asking)

    def _tells(self, s: State, place: int, worker: Worker) -> State:
        """As the agent takes it: one that was answered by a job that begins again by now is ended."""
        agent = self.places[place][0]
        record = self._seen_record(s, s.seen[agent])
        void = record is not None and record.is_gathering and worker.gathering != record.number
        if worker.stage == PREPARING and void:
            self.coverage["a void answer ends its worker"] += 1
            return s._replace(workers=with_value(s.workers, place, Worker(worker.number + 1)))
        return s._replace(workers=with_value(s.workers, place, worker._replace(told=worker.stage)))

    def _seen_record(self, s: State, number: int) -> Generation | None:
        known = (decoded(s.record), decoded(s.before))
        return next((g for g in known if g is not None and g.number == number), None)

    def _sees(self, s: State, agent: int, record: Generation) -> State:
        workers = list(s.workers)
        for place, worker in enumerate(workers):
            if self.places[place][0] != agent:
                continue
            worker_id, told = self.id_of(place, worker), STAGES[worker.told]
            if (
                record.is_gathering
                and told is not None
                and self._starts_again(told, worker_id, worker, record)
            ):
                self.coverage["an agent ends a worker that is ahead"] += 1
                workers[place] = Worker(worker.number + 1)
                continue
            if record.placement_of(worker_id) is not None:
                workers[place] = worker._replace(listed=record.number)
        if record.number > s.seen[agent] + 1:
            self.coverage["an agent missed a record"] += 1
        return s._replace(workers=tuple(workers), seen=with_value(s.seen, agent, record.number))

    def _starts_again(self, told: Stage, worker_id: str, worker: Worker, record: Generation) -> bool:
        answered = worker.answered and worker.told >= PREPARING
        return self.setup.starts_again(told, worker_id, worker.listed, record, answered=answered)

    def _note(self, before: Generation | None, after: Generation) -> None:
        if after.is_gathering:
            self.coverage[
                "gathers again" if after.again else "gathers" if after.members else "starts again"
            ] += 1
        elif before is not None and before.is_gathering:
            self.coverage["first generation"] += 1

    def check_stuck(self, s: State) -> None:
        """`s` has no successor but faults."""
        record = decoded(s.record)
        if s.ended:
            self.coverage["the job failed"] += 1
            return
        alive = [self.id_of(i, w) for i, w in enumerate(s.workers) if self.is_there(s, i)]
        if sum(n >= 0 for n in s.seen) < self.setup.minimum:
            self.coverage["below the minimum"] += 1
            return
        if record is None or record.is_gathering or {m.worker_id for m in record.members} != set(alive):
            raise Violation(f"stuck: {record}")
        self.coverage["all train"] += 1


def explore(setup: Setup) -> Exploration:
    """Visit every reachable state. Raises Violation with the shortest history that leads to it."""
    return exploring.explore(Model(setup))
