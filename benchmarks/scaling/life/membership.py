"""Follows the membership of a simulated job by the leader's own decision (bagua_agent/membership/formation).

After a loss or a join the picture is given to `decide`, and its waits are followed by their own clock, until a
generation is written. So who is in the next generation, of which kind it is, and how long the leader gathers before it
decides, come from the runtime. The times of messages and of building a group do not: recovery.py adds them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from bagua_agent.membership.actions import WriteGeneration
from bagua_agent.membership.formation.decision import decide
from bagua_agent.membership.policy import Policy
from bagua_agent.membership.view import (
    AgentView,
    Desired,
    Evidence,
    JobView,
    MemberView,
    SuspicionView,
)
from bagua_contract.records import Generation, GenerationKind, SuspicionKind

_MOST_WAITS = 1000


class NotDecided(Exception):
    """The leader writes no generation, whatever time passes."""


@dataclass(frozen=True, slots=True)
class Change:
    """A generation that follows an event. waited_s: by the leader's own rules, before it was written."""

    kind: GenerationKind
    nodes: int
    waited_s: float
    reason: str


class Membership:
    """A job of `nodes` nodes with a worker each, which all take part from the start. least: nodes that it needs."""

    def __init__(self, nodes: int, least: int = 1, policy: Policy | None = None) -> None:
        self._policy = Policy() if policy is None else policy
        self._joined = 0
        self._view = JobView(desired=Desired(least, nodes))
        for _ in range(nodes):
            self._add(0.0)
        self.began = self._until_written(0.0)
        self._commit()

    @property
    def nodes(self) -> tuple[str, ...]:
        """Those of the generation in force, in the order of ranks."""
        record = self._view.generation
        assert record is not None
        return tuple(member.agent_id for member in record.members)

    @property
    def record(self) -> Generation:
        assert self._view.generation is not None
        return self._view.generation

    def lose(self, agent_id: str, now_s: float) -> Change:
        """The node's keys go, and every other worker reports that the generation is broken. Raises NotDecided."""
        view, record = self._view, self.record
        agents = {a: v for a, v in view.agents.items() if a != agent_id}
        members = {w: v for w, v in view.members.items() if v.agent_id != agent_id}
        gone = {**view.gone, agent_id: view.agents[agent_id]}
        reports = {
            worker: SuspicionView(
                worker,
                record.number,
                SuspicionKind.BROKEN,
                (agent_id,),
                record.number,
                seen_since_s=now_s,
                broken_since_s=now_s,
            )
            for worker in members
        }
        self._view = replace(view, agents=agents, members=members, gone=gone, suspicions=reports)
        change = self._until_written(now_s)
        self._commit()
        return change

    def join(self, now_s: float) -> Change:
        """Another node has come, and its worker is ready. Raises NotDecided, where there is no room for it."""
        self._add(now_s)
        change = self._until_written(now_s)
        self._commit()
        return change

    # -- the picture

    def _add(self, now_s: float) -> None:
        self._joined += 1
        number, name = self._joined, f"n{self._joined:06d}"
        address = f"10.{number >> 16 & 255}.{number >> 8 & 255}.{number & 255}"
        agent = AgentView(name, name, 1, "", False, f"{address}:1", number)
        member = MemberView(f"{name}.0", name, 0, f"{address}:2", {"model": "m"}, 0, number, now_s)
        view = self._view
        self._view = replace(
            view,
            agents={**view.agents, name: agent},
            members={**view.members, member.worker_id: member},
        )

    def _until_written(self, now_s: float) -> Change:
        began_s, reason = now_s, ""
        for _ in range(_MOST_WAITS):
            leader = next(iter(self._view.agents))
            decision = decide(self._view, Evidence(leader), now_s, self._policy)
            if isinstance(decision.action, WriteGeneration):
                record = decision.action.generation
                self._view = replace(self._view, generation=record)
                return Change(record.kind, len(record.members), now_s - began_s, decision.reason)
            reason = decision.reason
            if decision.action is not None or decision.wake_at_s is None:
                break
            now_s = max(decision.wake_at_s, now_s + 1e-6)
        raise NotDecided(f"no generation after {now_s - began_s:.1f} s: {reason}")

    def _commit(self) -> None:
        """Every member commits a step in the new generation."""
        number = self.record.number
        inside = {member.worker_id for member in self.record.members}
        members = {
            worker: replace(view, committed_generation=number) if worker in inside else view
            for worker, view in self._view.members.items()
        }
        self._view = replace(
            self._view,
            members=members,
            suspicions={},
            gone={},
            committed_generation=number,
        )
