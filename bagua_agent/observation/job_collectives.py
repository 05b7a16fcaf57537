"""Asks all workers of a job for the collectives that they have under way, side by side by node.

A node's workers are asked one after the other, for an agent serves few calls of people at once. The calls are bounded,
and workers that were not asked in time are reported so. What the answers mean is decided in collectives.py.
"""

from __future__ import annotations

import time

from bagua_agent.observation.agent_calls import MOST_CALLED, AgentBusy, AgentSeen, JobAgents
from bagua_agent.observation.collectives import OddAnswer, WorkerCollectives, parse
from bagua_agent.observation.job_facts import JobFacts
from bagua_contract import control_pb2

WITHIN_S = 12.0  # for all workers of a node


def read_collectives(agents: JobAgents, facts: JobFacts) -> list[WorkerCollectives]:
    """Returns the collectives of every worker in `facts`, by rank. Does not raise for a worker or an agent that does
    not answer."""
    by_agent: dict[str, list[tuple[AgentSeen, control_pb2.WorkerNow]]] = {}
    for agent, worker in facts.workers:
        by_agent.setdefault(agent.agent_id, []).append((agent, worker))

    def ask(
        asked: tuple[int, list[tuple[AgentSeen, control_pb2.WorkerNow]]],
    ) -> list[WorkerCollectives]:
        number, workers = asked
        until_s = time.monotonic() + WITHIN_S
        return [
            _said(agents, agent, worker, is_asked=number < MOST_CALLED and time.monotonic() < until_s)
            for agent, worker in workers
        ]

    found = [each for said in agents.side_by_side(ask, enumerate(by_agent.values())) for each in said]
    silent = [WorkerCollectives(None, a.node_name, problem=_SILENT) for a in facts.agents if a.is_silent]
    silent += [WorkerCollectives(None, a.node_name, problem=_BUSY) for a in facts.agents if a.busy]
    return sorted([*found, *silent, *_left_out(facts)], key=lambda w: (w.rank is None, w.rank or 0, w.place))


_SILENT = "its agent does not answer"
_BUSY = "its agent serves too many calls at once"
_NOT_ASKED = f"it was not asked: a job's first {MOST_CALLED} nodes are"


def _left_out(facts: JobFacts) -> list[WorkerCollectives]:
    """Returns the workers of nodes that are not asked: by rank, as the generation names them; a node alone where it has
    none."""
    nodes = {agent.agent_id: agent.node_name for agent in facts.agents if not agent.asked}
    members = facts.generation.members if facts.generation is not None else ()
    members = tuple(m for m in members if m.agent_id in nodes)
    places = [(m.global_rank, f"slot {m.slot} of {m.node_name}") for m in members]
    without = [(None, nodes[agent_id]) for agent_id in nodes.keys() - {m.agent_id for m in members}]
    return [
        WorkerCollectives(rank, place, problem=_NOT_ASKED, asked=False) for rank, place in [*places, *without]
    ]


def _said(
    agents: JobAgents, agent: AgentSeen, worker: control_pb2.WorkerNow, *, is_asked: bool
) -> WorkerCollectives:
    rank = worker.global_rank if worker.HasField("global_rank") else None
    place = f"slot {worker.slot} of {agent.node_name}"
    if not is_asked:
        problem = "it was not asked: the workers before it took too long"
        return WorkerCollectives(rank, place, problem=problem, asked=False)
    try:
        reply = agents.collectives(agent, worker.slot)
    except AgentBusy as error:
        return WorkerCollectives(rank, place, problem=str(error))
    if reply is None:
        return WorkerCollectives(rank, place, problem=_SILENT)
    if reply.problem:
        return WorkerCollectives(rank, place, problem=reply.problem)
    try:
        return parse(rank, place, reply.answer)
    except OddAnswer as error:
        return WorkerCollectives(rank, place, problem=str(error))
