"""Facts of a small job for tests: two nodes with a worker each, in generation 3."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

from bagua_agent.observation.agent_calls import AgentSeen, JobAgents
from bagua_agent.observation.job_facts import JobFacts
from bagua_contract import control_pb2, session_pb2
from bagua_contract import membership_pb2 as pb
from bagua_contract.records import Generation, GenerationKind, Placement

NOW_S = 1000.0


def placement(rank: int) -> Placement:
    return Placement(f"w{rank}", f"a{rank}", f"h{rank}", 0, rank, rank, 0, "", 1, 1, True)


def generation(size: int = 2, **other: Any) -> Generation:
    kind = other.pop("kind", GenerationKind.PLANNED)
    return Generation(3, 2, kind, tuple(placement(rank) for rank in range(size)), reason="why not", **other)


def worker(
    rank: int | None, *, step: int = 10, computing_s: float = 1.0, **progress: Any
) -> control_pb2.WorkerNow:
    """Committed 10 steps of its own, unless `step` says more."""
    report = session_pb2.Progress(
        generation=3, step=step, steps_per_s=2.0, step_counts=[step], computing_s=computing_s, **progress
    )
    return control_pb2.WorkerNow(slot=0, worker_id=f"w{rank}", pid=1, global_rank=rank, progress=report)


def agent(rank: int, *workers: control_pb2.WorkerNow, answers: bool = True, **other: Any) -> AgentSeen:
    node = control_pb2.ReadNodeReply(
        node_name=f"h{rank}", agent_id=f"a{rank}", workers=workers, store_answers=True
    )
    seen = AgentSeen(f"a{rank}", f"h{rank}", 1, False, "127.0.0.1:1", node if answers else None)
    return replace(seen, **other)


class AnsweringAgents(JobAgents):
    """Each agent that is asked for its node answers at once, as `agent` with one worker."""

    def __init__(self) -> None:
        super().__init__(cast(Any, None), "demo")

    def _ask(self, address: str, call: Any) -> Any:
        rank = int(address.rpartition(":")[2])
        return agent(rank, worker(rank)).node


def many_agents(count: int) -> tuple[AgentSeen, ...]:
    """As a look at a job of `count` nodes finds them."""
    agents = AnsweringAgents()
    try:
        return agents.ask_again(
            tuple(agent(n, answers=False, address=f"127.0.0.1:{n}") for n in range(count))
        )
    finally:
        agents.close()


def facts(at_s: float = NOW_S, **other: Any) -> JobFacts:
    found: Mapping[str, Any] = {
        "job_id": "demo",
        "at_unix_s": at_s,
        "spec": pb.JobSpec(),
        "desired": pb.Desired(min_nodes=1, max_nodes=2),
        "generation": generation(),
        "agents": (agent(0, worker(0)), agent(1, worker(1))),
        "members": 2,
        "suspicions": (),
        "failures": (),
        "events": (),
        "result": None,
        "closing": False,
        **other,
    }
    return JobFacts(**found)
