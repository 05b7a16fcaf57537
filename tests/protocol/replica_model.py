"""Membership of replicas of two workers as a transition system, explored completely: docs/design/replicas.md.

Owns workers on a few nodes, what their agents have carried out, the records in the store, and the invariants A1 to A5,
I1 and I6. The decisions are the real ones: `decide_replicas` and `decide` write every record. A step is a vote of all
members of a generation; what each shard reports of it becomes known one by one. Agents act on records late.

Left out: gatherings (gathering_model.py), suspicions and probes, and the store's loss of keys. A worker is at its first
step as soon as it has its replica.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import NamedTuple

from bagua_agent.membership.actions import WriteGeneration, WriteResult
from bagua_agent.membership.formation import decision
from bagua_agent.membership.formation.replicas import ReplicaChanges, decide_replicas
from bagua_agent.membership.policy import Policy
from bagua_agent.membership.replica_groups import groups, groups_in, lists_whole_replicas
from bagua_agent.membership.view import (
    AgentView,
    Desired,
    Evidence,
    FailureView,
    JobView,
    MemberView,
    ReplicaView,
    Waiting,
)
from bagua_contract.records import Generation, GenerationKind, Stage
from bagua_contract.replica import Replica
from tests.protocol import exploring
from tests.protocol.exploring import Exploration, Violation, with_value

SIZE = 2
NOW_S = 1e6  # every window has passed
NONE = Evidence("a")
LONG_AGO = Evidence("a", waiting=Waiting.HOLDER, waiting_since_s=-NOW_S)
POLICY = Policy()
STARTED, ASSEMBLING, LOOP = range(3)


class Worker(NamedTuple):
    """number: workers of its slot before it, all of which failed. group: its replica, as it was told. has: generation
    of the newest commit that it holds; told: as its key says."""

    number: int = 0
    stage: int = STARTED
    group: tuple[str, ...] = ()
    has: int = 0
    told: int = 0


class State(NamedTuple):
    """lost: by agent, whether its host is. replicas: encoded records in the order of their creation. record, before:
    the newest generation and the one before, encoded; empty for none. newest: generation of the newest commit."""

    workers: tuple[Worker, ...]
    lost: tuple[bool, ...]
    replicas: tuple[bytes, ...] = ()
    record: bytes = b""
    before: bytes = b""
    newest: int = 0
    kills: int = 0
    losses: int = 0
    ended: bool = False


@dataclass(frozen=True)
class Setup:
    """slots: of each node. at_once: all first workers wait for their replicas from the start. changed,
    changed_replicas: what a leader without some rule would write. kills_on_over: agents do."""

    slots: tuple[int, ...]
    kills: int = 0
    losses: int = 0
    minimum: int = 1
    checkpoints: bool = False
    changed: Callable[[Generation], Generation] = lambda record: record
    changed_replicas: Callable[[ReplicaChanges], ReplicaChanges] = lambda changes: changes
    kills_on_over: bool = True
    at_once: bool = True


@cache
def decoded(record: bytes) -> Generation | None:
    return Generation.decode(record) if record else None


@cache
def replica_of(record: bytes) -> Replica:
    return Replica.decode(record)


class Model:
    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.places = [(agent, slot) for agent, slots in enumerate(setup.slots) for slot in range(slots)]
        self.coverage: Counter[str] = Counter()
        self._decisions: dict[object, tuple[WriteGeneration | WriteResult | None, ReplicaChanges]] = {}

    def initial(self) -> State:
        setup = self.setup
        return State(
            (Worker(stage=ASSEMBLING if setup.at_once else STARTED),) * len(self.places),
            (False,) * len(setup.slots),
            kills=setup.kills,
            losses=setup.losses,
        )

    def id_of(self, place: int, number: int) -> str:
        agent, slot = self.places[place]
        return f"{'abcd'[agent]}.{slot}.{number}"

    def alive(self, s: State) -> dict[str, int]:
        """Worker to its place."""
        return {self.id_of(i, w.number): i for i, w in enumerate(s.workers) if not s.lost[self.places[i][0]]}

    # -- the leader

    def view(self, s: State) -> JobView:
        agents = {
            name: AgentView(name, f"host-{name}", self.setup.slots[i], "", False, "h:1", i + 1)
            for i, name in enumerate("abcd"[: len(self.setup.slots)])
            if not s.lost[i]
        }
        members, failures = {}, {}
        for i, worker in enumerate(s.workers):
            agent, slot = self.places[i]
            for number in range(worker.number):
                gone = self.id_of(i, number)
                failures[gone] = FailureView(gone, f"host-{'abcd'[agent]}", 0, False, False, "killed", i)
            if worker.stage != STARTED and not s.lost[agent]:
                worker_id = self.id_of(i, worker.number)
                stage = Stage.LOOP if worker.stage == LOOP else Stage.ASSEMBLING
                revision = 100 + i + 100 * worker.number
                print_ = {"model": "m"} if stage is Stage.LOOP else {}
                members[worker_id] = MemberView(
                    worker_id, "abcd"[agent], slot, "h:2", print_, worker.told, revision, 0.0, stage
                )
        before = decoded(s.before)
        records = [replica_of(r) for r in s.replicas]
        return JobView(
            generation=decoded(s.record),
            earlier=() if before is None else (before,),
            committed_generation=max((w.told for w in s.workers), default=0),
            agents=agents,
            members=members,
            failures=failures,
            desired=Desired(self.setup.minimum, len(self.setup.slots)),
            has_checkpoints=self.setup.checkpoints,
            replica_size=SIZE,
            replicas={r.replica_id: ReplicaView(r, i) for i, r in enumerate(records)},
        )

    def decisions(self, s: State) -> tuple[WriteGeneration | WriteResult | None, ReplicaChanges]:
        key = (
            tuple((w.number, w.stage, w.told) for w in s.workers), s.lost, s.replicas, s.record, s.before,
        )  # fmt: skip
        if key not in self._decisions:
            view = self.view(s)
            made = decision.decide(view, NONE, NOW_S, POLICY)
            if made.waiting is Waiting.HOLDER:
                made = decision.decide(view, LONG_AGO, NOW_S, POLICY)
            action = made.action
            assert action is None or isinstance(action, WriteGeneration | WriteResult), made
            if isinstance(action, WriteGeneration):
                action = replace(action, generation=self.setup.changed(action.generation))
            changes = self.setup.changed_replicas(decide_replicas(view, NONE, NOW_S, POLICY))
            self._decisions[key] = action, changes
        return self._decisions[key]

    def check_record(self, s: State, made: Generation) -> None:
        if not lists_whole_replicas(made, SIZE):
            raise Violation(f"A1: generation {made.number} lists part of a replica")
        workers = {self.id_of(i, w.number): w for i, w in enumerate(s.workers)}
        for members in groups_in(made, SIZE):
            ids = tuple(m.worker_id for m in members)
            told = {workers[w].group for w in ids if w in workers}
            if told - {ids}:
                raise Violation(f"A1: generation {made.number} lists {ids}, which were told {told}")
            if any(w in r.worker_ids and r.over for r in map(replica_of, s.replicas) for w in ids):
                raise Violation(f"A5: generation {made.number} lists {ids}, which are over")
        if s.newest and made.base and made.members and not self._held(s, made):
            raise Violation(f"I6: no replica of generation {made.number} holds the state as a whole")

    def _held(self, s: State, record: Generation) -> bool:
        has = {self.id_of(i, w.number): w.has for i, w in enumerate(s.workers)}
        return any(
            all(has.get(m.worker_id, 0) == s.newest for m in members) for members in groups_in(record, SIZE)
        )

    # -- events

    def successors(self, s: State) -> Iterator[tuple[str, State, bool]]:
        """(what happens, the state after it, whether it is a fault)."""
        if s.ended:
            return
        action, changes = self.decisions(s)
        if isinstance(action, WriteResult):
            yield f"leader: {action.reason}", s._replace(ended=True), False
        elif action is not None:
            made = action.generation
            self.check_record(s, made)
            self.coverage[f"{made.kind.name.lower()} of {made.world_size}"] += 1
            again = made.number > 1 and made.base == 0
            after = s._replace(record=made.encode(), before=s.record, newest=0 if again else s.newest)
            yield f"leader writes {made.kind.name} {made.number} = {_ids(made)}", after, False
        if changes.formed or changes.over or changes.forgotten:
            yield "leader writes replicas", self._written(s, changes), False
        for agent, lost in enumerate(s.lost):
            if s.losses and not lost and sum(not n for n in s.lost) > 1:
                gone = s._replace(lost=with_value(s.lost, agent, True), losses=s.losses - 1)
                yield f"host {'abcd'[agent]} is lost", gone, True
        yield from self._commits(s)
        for worker_id, place in self.alive(s).items():
            yield from self._worker_events(s, worker_id, place)

    def _written(self, s: State, changes: ReplicaChanges) -> State:
        records = {replica_of(r).replica_id: r for r in s.replicas}
        for replica in (*changes.formed, *changes.over):
            known = records.get(replica.replica_id)
            if known is not None and replica_of(known).members != replica.members:
                raise Violation(f"A2: {replica.replica_id} is written over")
            records[replica.replica_id] = replica.encode()
            self.coverage["a replica is over" if replica.over else "a replica is formed"] += 1
        for replica_id in changes.forgotten:
            self.coverage["a record is forgotten"] += 1
            del records[replica_id]
        return s._replace(replicas=tuple(records.values()))

    def _commits(self, s: State) -> Iterator[tuple[str, State, bool]]:
        """All members of a generation take a step: of the newest, or of the one before while a planned one pends."""
        newest, before = decoded(s.record), decoded(s.before)
        for record in (newest, before):
            if record is None or not record.members:
                continue
            pending = newest is not None and newest.kind is GenerationKind.PLANNED and newest.base > 0
            if record is before and (not pending or newest is None or s.newest >= newest.number):
                continue
            alive = self.alive(s)
            places = [alive.get(m.worker_id) for m in record.members]
            members = [(p, s.workers[p]) for p in places if p is not None]
            if len(members) < record.world_size or any(w.stage != LOOP for _, w in members):
                continue
            if all(w.has >= record.number for _, w in members):
                continue
            if s.newest and record.base and not self._held(s, record):
                raise Violation(f"I1: generation {record.number} steps without the state of {s.newest}")
            self.coverage["committed"] += 1
            workers = list(s.workers)
            for place, worker in members:
                workers[place] = worker._replace(has=record.number)
            after = s._replace(workers=tuple(workers), newest=record.number)
            yield f"all commit in {record.number}", after, False

    def _worker_events(self, s: State, me: str, place: int) -> Iterator[tuple[str, State, bool]]:
        worker = s.workers[place]

        def becomes(new: Worker) -> State:
            return s._replace(workers=with_value(s.workers, place, new))

        if s.kills and worker.stage != STARTED:
            dead = becomes(Worker(worker.number + 1))._replace(kills=s.kills - 1)
            yield f"{me} dies", dead, True
        if worker.stage == STARTED:
            yield f"{me} waits for its replica", becomes(worker._replace(stage=ASSEMBLING)), False
            return
        found = next((r for r in groups(self.view(s)).records.values() if me in r.worker_ids), None)
        if found is not None and found.over:
            if self.setup.kills_on_over:
                self.coverage["an agent kills a worker of a replica that is over"] += 1
                yield f"{me} is killed: its replica is over", becomes(Worker(worker.number + 1)), False
        elif found is not None and worker.stage == ASSEMBLING:
            yield f"{me} has its replica", becomes(worker._replace(stage=LOOP, group=found.worker_ids)), False
        if found is not None and worker.group and worker.group != found.worker_ids:
            raise Violation(f"A2: {me} was told {worker.group}, and the record has {found.worker_ids}")
        if worker.told < worker.has:
            yield (
                f"{me}'s commit in {worker.has} is reported",
                becomes(worker._replace(told=worker.has)),
                False,
            )

    def check_stuck(self, s: State) -> None:
        """`s` has no successor but faults."""
        if s.ended:
            self.coverage["the job failed"] += 1
            return
        record = decoded(s.record)
        there = [slots for slots, lost in zip(self.setup.slots, s.lost, strict=True) if not lost]
        replicas = sum(there) // SIZE
        if replicas < 1 or len(there) < self.setup.minimum:
            self.coverage["below the minimum"] += 1
            return
        if record is None or record.world_size != replicas * SIZE or s.newest != record.number:
            raise Violation(f"stuck: {record}")
        self.coverage["all train" if sum(there) == replicas * SIZE else "a spare is left over"] += 1


def _ids(record: Generation) -> str:
    return " ".join(m.worker_id for m in record.members) or "no workers"


def explore(setup: Setup) -> Exploration:
    """Visit every reachable state. Raises Violation with the shortest history that leads to it."""
    return exploring.explore(Model(setup))
