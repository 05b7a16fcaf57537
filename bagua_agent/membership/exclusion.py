"""Chooses the nodes that the next generation leaves out, and for how long.

It does so when all agents live and a generation does not work. Workers report which hosts they can't reach. A report
is a hint: a transport may name a peer that merely gave up first, or no peer. So exclusion_options lists sets of nodes
in order of preference, and decision.py takes the first that keeps the minimum and a holder. A node that is left out
may come back after a quarantine that grows each time.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from bagua_agent.base.backoff import delay_s
from bagua_agent.base.plain_text import some
from bagua_agent.membership.policy import Policy
from bagua_agent.membership.view import Quarantine


@dataclass(frozen=True, slots=True)
class SuspectNode:
    """A node of a generation that does not work. Sequences of them are in rank order.

    reports: its own workers say that they can't go on. times_left_out: lately.
    """

    agent_id: str
    node_name: str
    holder: bool
    reports: bool = False
    times_left_out: int = 0


@dataclass(frozen=True, slots=True)
class ExclusionOption:
    agent_ids: frozenset[str]
    why: str


def exclusion_options(
    nodes: Sequence[SuspectNode],
    accusations: Iterable[tuple[str, str]],
    may_go: Collection[str] | None = None,
) -> list[ExclusionOption]:
    """Returns the sets of nodes that could be left out, best first; never all of `nodes`.

    accusations: (agent that says so, agent that it can't reach). may_go: agents that can be left out; all by default.
    First the fewest nodes whose absence leaves no two that name each other; then single nodes: the one named by most
    others first, rather one without the state, then one that reports trouble itself, then the one left out less often,
    then the last in rank.
    """
    place = {n.agent_id: i for i, n in enumerate(nodes)}
    edges = {(a, b) for a, b in accusations if a != b and a in place and b in place}
    named_by = {n.agent_id: {a for a, b in edges if b == n.agent_id} for n in nodes}
    allowed = [n for n in nodes if may_go is None or n.agent_id in may_go]

    def preference(node: SuspectNode, weight: int) -> tuple[int, bool, bool, int, int]:
        return (-weight, node.holder, not node.reports, node.times_left_out, -place[node.agent_id])

    options: list[ExclusionOption] = []
    mutual = {frozenset((a, b)) for a, b in edges if (b, a) in edges}
    out: set[str] = set()
    while cut := [pair for pair in mutual if not pair & out]:
        weight = {n.agent_id: sum(n.agent_id in pair for pair in cut) for n in allowed}
        candidates = [n for n in allowed if weight[n.agent_id] and n.agent_id not in out]
        if not candidates:
            break
        out.add(min(candidates, key=lambda n: preference(n, weight[n.agent_id])).agent_id)
    if out and len(out) < len(nodes):
        names = {n.agent_id: n.node_name for n in nodes}
        pairs = sorted((sorted(pair, key=place.__getitem__) for pair in mutual if pair & out), key=str)
        shown = some((f"{names[a]} and {names[b]}" for a, b in pairs), 3, what="pairs")
        options.append(ExclusionOption(frozenset(out), f"{shown} can't reach each other"))
    for node in sorted(allowed, key=lambda n: preference(n, len(named_by[n.agent_id]))):
        alone = frozenset({node.agent_id})
        if len(nodes) > 1 and all(option.agent_ids != alone for option in options):
            options.append(ExclusionOption(alone, _complaint(node, nodes, named_by[node.agent_id])))
    return options


def _complaint(node: SuspectNode, nodes: Sequence[SuspectNode], named_by: Collection[str]) -> str:
    if not named_by:
        return "no worker reports which host can't be reached"
    names = [n.node_name for n in nodes if n.agent_id in named_by]
    return f"{node.node_name} can't be reached by {', '.join(names[:8])}"


def quarantined(
    before: Mapping[str, Quarantine], agent_ids: Iterable[str], why: str, now_s: float, policy: Policy
) -> Mapping[str, Quarantine]:
    """Returns the quarantines once `agent_ids` are left out; those that are long over are forgotten."""
    lately = {a: q for a, q in before.items() if now_s < q.until_s + policy.quarantine_longest_s}
    added = {}
    for agent_id in agent_ids:
        times = lately[agent_id].times + 1 if agent_id in lately else 1
        wait_s = delay_s(times, policy.quarantine_first_s, policy.quarantine_longest_s)
        added[agent_id] = Quarantine(now_s + wait_s, times, why)
    return {**lately, **added}
