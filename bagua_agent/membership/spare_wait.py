"""Gives the reason why a ready node is left out of the generation and waits: for an allowed size, for the cooldown, or
for a place among as many nodes as are wanted. Pure.

The leader decides the sizes (formation/decision.py, restarting.py); this only describes the agent's own picture of
them.
"""

from __future__ import annotations

from bagua_agent.base.plain_text import counted
from bagua_agent.membership.view import JobView


def described(view: JobView, agent_id: str, now_s: float) -> str:
    """Returns the reason for which a node waits; empty for one that is in the generation, not ready, or about to be
    taken."""
    record, wanted = view.generation, view.wanted
    if record is None or wanted is None or not record.members:
        return ""
    inside = {m.agent_id for m in record.members}
    startable = {a.agent_id for a in view.agents.values() if a.ready}
    able = startable | {m.agent_id for m in view.members.values()}
    spare = {a.agent_id for a in view.agents.values() if a.agent_id in able - inside and not a.leaving}
    if agent_id not in spare:
        return ""
    room, nodes, until_s = view.room(wanted), record.node_count, view.cooldown_until_s
    in_force = f"generation {record.number} has {counted(nodes, 'node')}"
    if now_s < until_s and room.fit(nodes + len(spare)) > nodes:
        return view.size_policy.waits(in_force).removesuffix("; ")
    if nodes >= wanted.max_nodes:
        return (
            f"waiting on standby: {in_force}, as many as are wanted; this node takes the place of the next one that is "
            "lost or leaves"
        )
    awaits = room.awaits(nodes, len(spare))
    return f"{awaits}{in_force}" if awaits else ""
