"""Names workers in reasons for people: by global rank and node, and why they are gone. Pure.

A worker's id says neither its rank nor, where a node has several agents, which host it is on.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from bagua_agent.base.plain_text import shortened, some
from bagua_agent.membership.job_condition import in_force
from bagua_agent.membership.view import Evidence, FailureView, JobView
from bagua_contract.records import Placement

_LONGEST_WHY = 160  # a reason travels in the record that each agent reads


def named(view: JobView, worker_ids: Iterable[str]) -> str:
    """Names workers by global rank and node, as "global ranks 1, 2 on h2, global rank 3 on h3"."""
    return some(f"{ranks} on {node}" for node, ranks, _ in _by_node(view, _placements(view), worker_ids))


def lost(view: JobView, evidence: Evidence, worker_ids: Iterable[str]) -> str:
    """Says that workers are lost and why, as "lost global rank 1 on h2 (killed by SIGKILL)"."""
    placements = _placements(view)
    parts = []
    for node, ranks, ids in _by_node(view, placements, worker_ids):
        found = (_cause(view, evidence, worker_id, placements.get(worker_id)) for worker_id in ids)
        causes = dict.fromkeys(filter(None, found))
        parts.append(f"{ranks} on {node}" + (f" ({some(causes, 2, '; ')})" if causes else ""))
    return f"lost {some(parts)}"


def named_failure(failure: FailureView) -> str:
    """Names a failed worker, as "global rank 1 on h2 (ValueError: bad)"; by its slot if it was in no generation yet."""
    rank = f"global rank {failure.global_rank}" if failure.global_rank >= 0 else f"slot {failure.slot}"
    return f"{rank} on {failure.node_name} ({failure.summary})"


def nodes_of(view: JobView, agent_ids: Iterable[str]) -> str:
    """Names the nodes of agents; by the agent's id if it is not known here."""
    known = {**view.gone, **view.agents}
    return some(known[a].node_name if a in known else a for a in agent_ids)


def _placements(view: JobView) -> dict[str, Placement]:
    """Returns each worker's placement in the generation in force, whose ranks people have read; else in the newest
    record that lists the worker."""
    older = sorted(view.earlier, key=lambda record: record.number)
    records = (*older, view.generation, view.record(in_force(view, view.generation)))
    return {m.worker_id: m for record in records if record is not None for m in record.members}


def _by_node(
    view: JobView, placements: Mapping[str, Placement], worker_ids: Iterable[str]
) -> list[tuple[str, str, list[str]]]:
    """Returns the node, its workers' ranks in words, and their ids, for each node in the order of `worker_ids`."""
    nodes: dict[str, list[Placement]] = {}
    unlisted: list[tuple[str, str, list[str]]] = []
    for worker_id in worker_ids:
        if (placement := placements.get(worker_id)) is not None:
            nodes.setdefault(placement.node_name, []).append(placement)
            continue
        member = view.members.get(worker_id)
        agent = None if member is None else view.agents.get(member.agent_id)
        node = "an unknown node" if agent is None else agent.node_name
        unlisted.append((node, f"worker {worker_id}", [worker_id]))
    found = []
    for node, here in nodes.items():
        numbers = sorted(p.global_rank for p in here)
        ranks = f"global rank{'s' if len(numbers) > 1 else ''} {some(map(str, numbers))}"
        found.append((node, ranks, [p.worker_id for p in here]))
    return found + unlisted


def _cause(view: JobView, evidence: Evidence, worker_id: str, placement: Placement | None) -> str:
    """Returns why the worker is gone, as far as the records say; empty if they do not."""
    if (failure := view.failures.get(worker_id)) is not None:
        return shortened(failure.summary, _LONGEST_WHY)
    if worker_id in evidence.dead_workers:
        return "the agent reports its end"
    if worker_id in view.finished:
        return "ended with 0"
    if placement is None:
        return ""
    agent, dead = view.agents.get(placement.agent_id), evidence.dead_agents.get(placement.agent_id)
    if dead is not None and (agent is None or evidence.is_dead(agent)):
        return f"the agent {dead.how}"
    if agent is None:
        return "the agent is gone"
    # there, but job_condition.py counts it as absent
    return "with its replica" if worker_id in view.members and view.replica_size > 1 else ""
