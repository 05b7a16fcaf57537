"""Reads what the workers of a job print from the memory of its agents: for jobs whose output no daemon keeps.

An agent keeps the newest output of each slot. A worker that has its node's terminal to itself writes there directly,
and then there is none.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from bagua_agent.base.errors import BaguaError, UserError
from bagua_agent.base.plain_text import counted
from bagua_agent.etcd.client import Store
from bagua_agent.observation.agent_calls import MOST_CALLED, AgentSeen, JobAgents
from bagua_agent.observation.job_facts import JobFacts, read_facts
from bagua_agent.workers.output.stream_lines import ShownLines
from bagua_contract import control_pb2

LOOK_S = 0.5
STREAMS = {"out": control_pb2.ReadOutputRequest.STDOUT, "err": control_pb2.ReadOutputRequest.STDERR}


@dataclass(slots=True)
class _Reading:
    """The reading of one stream of a slot of one agent. rank: of the worker that wrote last."""

    node_name: str
    slot: int
    rank: int | None = None
    position: int = 0
    shown: ShownLines = field(default_factory=ShownLines)


@dataclass(frozen=True, slots=True)
class OutputLine:
    """A line of output. rank: global rank of the slot's worker now; None outside the newest generation."""

    node_name: str
    slot: int
    rank: int | None
    text: str

    @property
    def label(self) -> str:
        return f"{self.node_name}:{self.slot}" if self.rank is None else f"{self.node_name}:{self.rank}"


class JobOutput:
    """Shows the output of a job's workers. streams: of "out" and "err". rank: the only one that is wanted; None: all
    workers of the job. complain: gets a sentence about output that is not shown."""

    def __init__(
        self,
        store: Store,
        job_id: str,
        streams: tuple[str, ...],
        rank: int | None,
        tell: Callable[[OutputLine], object],
        complain: Callable[[str], object],
    ) -> None:
        self._store = store
        self._job_id = job_id
        self._streams = streams
        self._rank = rank
        self._tell = tell
        self._complain = complain
        self._agents = JobAgents(store, job_id)
        self._readings: dict[tuple[str, int, str], _Reading] = {}
        self._anything = False  # an agent keeps output of a slot
        self._has_counted = False  # the nodes that are not asked

    def close(self) -> None:
        self._agents.close()

    def show(self) -> None:
        """Shows the output that there is now. Raises UserError if there is nothing to read, and StoreUnavailable."""
        facts = self._facts()
        if not self._slots(facts):
            which = "no worker" if self._rank is None else f"no rank {self._rank}"
            raise UserError(
                f"job {self._job_id!r} has {which} on a node that answers; see `bagua-launch status {self._job_id}`"
                + (f" ({facts.problem})" if facts.problem else "")
            )
        self._read(facts)
        self._end_lines()
        if not self._anything:
            raise UserError(
                f"job {self._job_id!r} has written nothing that its agents keep: a worker alone on its node writes to "
                "the node's terminal; start it with --tee 3 to keep its output too"
            )

    def follow(self) -> None:
        """Shows output until the job has ended. Raises as `show`, but waits for output."""
        while True:
            facts = self._facts()
            self._read(facts)
            if facts.result is not None or not facts.agents:
                self._end_lines()
                return
            time.sleep(LOOK_S)

    def _facts(self) -> JobFacts:
        facts = read_facts(self._store, self._agents, self._job_id)
        if facts is None:
            raise UserError(f"job {self._job_id!r} is not in this etcd any more")
        if self._rank is not None:
            return self._with_rank_asked(facts, self._rank)
        left_out = sum(not agent.asked for agent in facts.agents)
        if left_out and not self._has_counted:
            self._has_counted = True
            self._complain(
                f"the output of {counted(left_out, 'node')} is left out, since a job's first {MOST_CALLED} nodes are "
                "asked; --rank shows a rank of any node"
            )
        return facts

    def _with_rank_asked(self, facts: JobFacts, rank: int) -> JobFacts:
        """Returns `facts`, with an answer of the rank's agent where a look at the whole job does not ask it."""
        members = facts.generation.members if facts.generation is not None else ()
        of_rank = {member.agent_id for member in members if member.global_rank == rank}
        left_out = tuple(a for a in facts.agents if not a.asked and a.agent_id in of_rank)
        answered = {agent.agent_id: agent for agent in self._agents.ask_again(left_out)}
        return replace(facts, agents=tuple(answered.get(a.agent_id, a) for a in facts.agents))

    def _slots(self, facts: JobFacts) -> list[tuple[AgentSeen, int, int | None]]:
        """Returns each agent and slot to read, with the global rank of the slot's worker."""
        found = []
        for agent, worker in facts.workers:
            rank = worker.global_rank if worker.HasField("global_rank") else None
            if self._rank is None or rank == self._rank:
                found.append((agent, worker.slot, rank))
        return found

    def _read(self, facts: JobFacts) -> None:
        for agent, slot, rank in self._slots(facts):
            for stream in self._streams:
                reading = self._readings.setdefault(
                    (agent.agent_id, slot, stream), _Reading(agent.node_name, slot)
                )
                reading.rank = rank
                try:
                    part = self._agents.output(agent, slot, STREAMS[stream], reading.position)
                except BaguaError:
                    continue  # it has ended meanwhile; the next look shows whether another one came
                self._anything |= part.kept
                if (missed := part.position - reading.position) > 0 and reading.position:
                    # what began before the gap does not go on after it
                    self._tell_lines(reading, reading.shown.end())
                    self._complain(
                        f"{reading.node_name}:{slot}: {missed} bytes of its output are not kept any more and not shown"
                    )
                reading.position = part.position + len(part.data)
                self._tell_lines(reading, reading.shown.feed(part.data))

    def _end_lines(self) -> None:
        """Ends the lines that no newline ends."""
        for reading in self._readings.values():
            self._tell_lines(reading, reading.shown.end())

    def _tell_lines(self, reading: _Reading, lines: list[str]) -> None:
        for line in lines:
            self._tell(OutputLine(reading.node_name, reading.slot, reading.rank, line))
