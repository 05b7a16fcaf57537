"""Small pictures of a job, written down in a line or two, for the tests of single rules."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from bagua_agent.membership.actions import Decision, WriteGeneration
from bagua_agent.membership.formation.decision import decide
from bagua_agent.membership.policy import Policy
from bagua_agent.membership.view import (
    AgentView,
    DepartureView,
    Desired,
    Evidence,
    FailureView,
    JobView,
    MemberView,
    SuspicionView,
)
from bagua_contract.records import Generation, GenerationKind, Placement, StateName, SuspicionKind

PLANNED, FAILOVER = GenerationKind.PLANNED, GenerationKind.FAILOVER
POLICY = Policy()
LEADER = Evidence(observer_agent_id="a")


def agent(name: str, *, slots: int = 1, leaving: bool = False, joined: int | None = None) -> AgentView:
    """Agents are letters and joined in the order of the alphabet."""
    revision = ord(name) - ord("a") + 1 if joined is None else joined
    return AgentView(name, f"host-{name}", slots, "", leaving, f"10.0.0.{ord(name) - 96}:1", revision)


def member(worker: str, *, committed: int = 0, ready_s: float = 0.0, fingerprint: str = "m") -> MemberView:
    """ "a1" is the worker in slot 1 of agent a; "a1x" is one respawned there."""
    revision = 100 + 10 * (ord(worker[0]) - ord("a")) + int(worker[1]) + 500 * (len(worker) - 2)
    host = f"10.0.0.{ord(worker[0]) - 96}:2"
    print_ = {"model": fingerprint}
    return MemberView(worker, worker[0], int(worker[1]), host, print_, committed, revision, ready_s)


def record(
    number: int,
    members: str,
    *,
    kind: GenerationKind = PLANNED,
    base: int | None = None,
) -> Generation:
    """members: "a0 b0:3" in rank order; ":3" came with 3 and has no state, the others hold it since 1."""
    placements = []
    agents: list[str] = []
    for rank, text in enumerate(members.split()):
        worker, _, since = text.partition(":")
        if worker[0] not in agents:
            agents.append(worker[0])
        known = member(worker)
        placements.append(
            Placement(
                worker_id=worker,
                agent_id=worker[0],
                node_name=f"host-{worker[0]}",
                slot=known.slot,
                global_rank=rank,
                node_rank=len(agents) - 1,
                local_rank=sum(p.agent_id == worker[0] for p in placements),
                store_address=known.store_address,
                since_generation=int(since or 1),
                join_revision=known.join_revision,
                holder=number > 1 and not since,
            )
        )
    return Generation(
        number=number,
        base=number - 1 if base is None else base,
        kind=kind,
        members=tuple(placements),
        fingerprint={"model": "m"},
    )


def picture(
    agents: Iterable[AgentView],
    members: Iterable[MemberView],
    generation: Generation | None = None,
    *,
    nodes: tuple[int, int] = (1, 8),
    earlier: tuple[Generation, ...] = (),
    suspicions: Iterable[SuspicionView] = (),
    failures: Iterable[FailureView] = (),
    **more: object,
) -> JobView:
    members = list(members)
    view = JobView(
        generation=generation,
        earlier=earlier,
        agents={a.agent_id: a for a in agents},
        members={m.worker_id: m for m in members},
        suspicions={s.worker_id: s for s in suspicions},
        failures={f.worker_id: f for f in failures},
        desired=Desired(*nodes),
        committed_generation=max((m.committed_generation for m in members), default=0),
    )
    return replace(view, **more)  # type: ignore[arg-type]


def failure(
    worker: str, *, step: int = 5, in_step: bool = True, script: bool = True, order: int = 1
) -> FailureView:
    return FailureView(worker, f"host-{worker[0]}", step, in_step, script, "ValueError: bad", order)


def departure(
    worker: str, generation: int, world_size: int = 1, *, step: int = 0, **last: Any
) -> DepartureView:
    """step: of the state that it held when it stepped aside; 0: it told nothing. last: of the last checkpoint."""
    state = StateName(generation, step) if step else StateName()
    return DepartureView(worker, f"host-{worker[0]}", generation, world_size, state, **last)


def suspicion(worker: str, generation: int, *, broken: bool = True, seen_s: float = 5.0) -> SuspicionView:
    kind = SuspicionKind.BROKEN if broken else SuspicionKind.STALLED
    return SuspicionView(worker, generation, kind, (), 1, seen_s, waiting_since_s=seen_s)


def decided(
    view: JobView, *, now_s: float = 10.0, evidence: Evidence = LEADER, policy: Policy = POLICY
) -> Decision:
    return decide(view, evidence, now_s, policy)


def written(decision: Decision) -> Generation:
    assert isinstance(decision.action, WriteGeneration), decision.reason
    return decision.action.generation


def workers(generation: Generation) -> str:
    return " ".join(m.worker_id for m in generation.members)
