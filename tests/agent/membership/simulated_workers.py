"""Workers as docs/design/steps.md describes them: they commit, switch, step aside, and end.

The truth that the leader's decisions are judged by: asserts one history at every commit.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field

from bagua_agent.membership.state_machine.machine import State, new_state
from bagua_agent.node.live_workers import must_start_again
from bagua_contract.records import Generation, GenerationKind, Stage


@dataclass
class Worker:
    """steps, name: of the state it holds; name 0: none. current: record it is in. listed: newest gathering that
    listed it, as its agent saw."""

    worker_id: str
    agent_id: str
    slot: int
    alive: bool = True
    current: Generation | None = None
    pending: Generation | None = None
    steps: int = 0
    name: int = 0
    reported: int = 0
    revision: int = 0
    suspected: int = 0
    broken_in: int = 0
    stage: Stage = Stage.LOOP
    listed: int = 0
    leaves: bool = False  # it was asked to, though its node stays
    unbuilt: int = 0  # newest pending record that it said it can't build

    def valid_steps(self, record: Generation) -> int:
        placement = record.placement_of(self.worker_id)
        assert placement is not None
        return self.steps if self.name >= placement.since_generation else 0


@dataclass
class Node:
    """silent: no network. storeless: etcd can't be reached, peers can."""

    agent_id: str
    slots: int
    alive: bool = True
    silent: bool = False
    storeless: bool = False
    leaving: bool = False
    revision: int = 0  # of its key; 0: it has none
    state: State = field(default_factory=lambda: new_state(""))
    cursor: int = 0
    wake_at_s: float | None = None

    @property
    def reaches_store(self) -> bool:
        return self.alive and not self.silent and not self.storeless


class SimulatedWorkers(ABC):
    """committed: steps of the job, all histories together, of which there may be only one. cuts: (a, b) for
    workers of agent a that can't reach those of agent b, though all agents answer."""

    def __init__(self) -> None:
        self.nodes: dict[str, Node] = {}
        self.workers: dict[str, Worker] = {}
        self.generation: Generation | None = None
        self.records: dict[int, Generation] = {}
        self.committed = 0
        self.cuts: set[tuple[str, str]] = set()

    @abstractmethod
    def end(self, worker: Worker, *, well: bool) -> None: ...

    @abstractmethod
    def put_worker(self, worker: Worker) -> None: ...

    def of(self, node: Node) -> list[Worker]:
        return [w for w in self.workers.values() if w.agent_id == node.agent_id]

    def kill_node(self, node: Node) -> None:
        node.alive = False
        for worker in self.of(node):
            worker.alive = False

    def look(self, worker: Worker) -> None:
        """The worker learns of the newest record."""
        record, node = self.generation, self.nodes[worker.agent_id]
        if record is None or not worker.alive or not node.reaches_store:
            return
        if self._is_before_loop(worker, record):
            return
        current = 0 if worker.current is None else worker.current.number
        inside = record.placement_of(worker.worker_id) is not None
        if record.number > current:
            if record.kind is GenerationKind.FAILOVER or record.base == 0:
                self._enter(worker, record)
            else:
                if worker.current is not None and record.base > current:
                    # Planned upon a generation that this worker never saw, so that one left it out: every
                    # member of a base has taken it.
                    worker.current, worker.steps, worker.name = None, 0, 0
                worker.pending = record
        if (node.leaving or worker.leaves) and worker.current is None and not inside:
            self.end(worker, well=True)

    def _is_before_loop(self, worker: Worker, record: Generation) -> bool:
        """Whether it is, or has ended; then the record means nothing more to it."""
        if record.is_gathering:
            if must_start_again(worker.stage, worker.worker_id, worker.listed, record):
                self.end(worker, well=False)
                return True
            if record.placement_of(worker.worker_id) is not None:
                worker.listed = record.number
        if worker.stage is Stage.WAITING:
            if self.nodes[worker.agent_id].leaving or worker.leaves:
                self.end(worker, well=True)
            elif record.placement_of(worker.worker_id) is not None:
                assert record.is_gathering, "no other generation lists a worker that waits before its loop"
                self._goes_on(worker, Stage.PREPARING)
                worker.current = record
            elif not record.is_gathering and self._trains(record):
                self._goes_on(worker, Stage.PREPARING)
            return True
        if worker.stage is Stage.PREPARING:
            if not record.is_gathering:
                listed = record.placement_of(worker.worker_id) is not None
                assert not listed, "no generation lists a worker that prepares"
            self._goes_on(worker, Stage.LOOP)
            return True
        return record.is_gathering

    def _goes_on(self, worker: Worker, stage: Stage) -> None:
        worker.stage = stage
        self.put_worker(worker)

    def _trains(self, record: Generation) -> bool:
        """Whether a member answers one that comes later, or one that has stepped aside."""
        if not record.members:
            waits = [w for w in self.workers.values() if w.alive and w.name and w.current is None]
            return any(
                f"{w.agent_id}:2" in record.answers_at and not self.nodes[w.agent_id].silent for w in waits
            )
        return any(w.alive and self._has_published(w) for w in self.members(record))

    def _has_published(self, worker: Worker) -> bool:
        """What the first workers' collectives gave: it has been in a generation that trains."""
        entered = worker.current is not None and not worker.current.is_gathering
        return (entered or worker.name > 0) and not self.nodes[worker.agent_id].silent

    def _enter(self, worker: Worker, record: Generation) -> None:
        worker.pending = None
        if record.placement_of(worker.worker_id) is not None:
            worker.current = record
            return
        worker.current = None
        if record.members:
            worker.steps = worker.name = 0  # the job goes on elsewhere: what it holds is old
        if self.nodes[worker.agent_id].leaving or worker.leaves:
            self.end(worker, well=True)

    def members(self, record: Generation) -> list[Worker]:
        return [self.workers[m.worker_id] for m in record.members]

    def cut_in(self, record: Generation) -> list[tuple[str, str]]:
        agents = {m.agent_id for m in record.members}
        return sorted((a, b) for a, b in self.cuts if a in agents and b in agents)

    def is_whole(self, gathering: Generation) -> bool:
        """Whether its members can wait for each other."""
        return not self.cut_in(gathering) and all(
            w.alive and not self.nodes[w.agent_id].silent for w in self.members(gathering)
        )

    def works(self, record: Generation) -> bool:
        return (
            bool(record.members)
            and not record.is_gathering
            and not self.cut_in(record)
            and all(
                w.alive
                and w.current is record
                and w.broken_in != record.number
                and not self.nodes[w.agent_id].silent
                for w in self.members(record)
            )
        )

    def commit(self, record: Generation) -> None:
        if not self.works(record):
            return
        members = self.members(record)
        steps = max(w.valid_steps(record) for w in members)
        assert steps == self.committed, f"one history: {steps} of {self.committed} in {record}"
        self.committed += 1
        for worker in members:
            worker.steps, worker.name = self.committed, record.number
        pendings = {w.pending.number if w.pending is not None else 0 for w in members}
        if len(pendings) == 1 and (number := pendings.pop()) > record.number:
            pending = self.records[number]
            joining = [w for w in self.members(pending) if w not in members]
            joins = all(w.alive and w.pending is pending and w.current is None for w in joining)
            if joins and not self.cut_in(pending):
                for worker in members + joining:
                    self._enter(worker, pending)
