"""The result that the leader writes names the failures that belong to the job's end."""

from __future__ import annotations

from bagua_agent.leadership.reports import Elected
from bagua_agent.membership import events as ev
from bagua_agent.membership.view import FailureView
from bagua_contract.records import Generation, GenerationKind, Placement
from tests.agent.leadership.test_dead_leader import Agent

CLOSED = "RuntimeError: Connection closed by peer [10.0.0.2]:4321"


def failed(agent: Agent, worker_id: str, summary: str, now_s: float) -> None:
    failure = FailureView(worker_id, f"host-{worker_id[0]}", 7, True, True, summary, order=int(now_s))
    agent.membership.advance(ev.FailureRecorded(now_s=now_s, failure=failure))


def test_the_casualties_of_a_result_are_those_of_its_end() -> None:
    agent = Agent()
    for name, revision in (("m", 7), ("n", 8), ("me", 9)):
        agent.sees_agent(name, revision)
    members = ("m.2", "n.1")
    for worker_id in members:
        agent.sees_member(worker_id)
    placements = tuple(
        Placement(w, w[0], f"host-{w[0]}", 0, rank, rank, 0, "", 1, 1, True) for rank, w in enumerate(members)
    )
    agent.membership.advance(
        ev.GenerationSeen(now_s=1.0, generation=Generation(1, 0, GenerationKind.PLANNED, placements, ""))
    )
    failed(agent, "m.1", CLOSED, 10.0)
    failed(agent, "n.1", CLOSED, 90_000.0)
    failed(agent, "m.2", "ValueError: boom", 90_001.0)
    agent.membership.take(Elected(1), 90_002.0)
    agent.membership.advance(ev.TimePassed(now_s=90_100.0))  # by then no other failure may explain it
    assert [result[-1] for result in agent.results] == ["and 1 casualty on 1 node"]
