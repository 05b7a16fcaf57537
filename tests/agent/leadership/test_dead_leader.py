"""An agent removes the keys of a leader that it found dead: those that it sees, as they were when it asked."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest

from bagua_agent.base.timers import Timers
from bagua_agent.job.membership_driver import JobMembership
from bagua_agent.job_state.context import JoinedJob
from bagua_agent.job_state.decode import LeaderKey
from bagua_agent.job_state.job_state import JobSeen
from bagua_agent.leadership.leadership import Leadership, ProbeResult
from bagua_agent.membership import events as ev
from bagua_agent.membership.actions import Question
from bagua_agent.membership.policy import Policy
from bagua_agent.membership.view import JobView, ProbeVerdict
from bagua_contract import membership_pb2 as pb

LEADER = LeaderKey("l", "10.0.0.1:1", create_revision=40)


class Agent:
    """One that does not lead; stands for the leader's side of it too. removed: what was asked to be removed."""

    def __init__(self) -> None:
        self.asked: list[tuple[Question, int]] = []
        self.removed: list[tuple[object, ...]] = []
        self.told: list[str] = []
        seen = JobSeen(spec=pb.JobSpec(), view=JobView(), leader=LEADER)
        job = SimpleNamespace(
            agent_id="me",
            seen=seen,
            timers=Timers(),
            narrator=SimpleNamespace(
                tell=self.told.append, tell_once=lambda topic, text: self.told.append(text)
            ),
            history=SimpleNamespace(leader_is=lambda agent_id, leading: None),
        )
        self.membership = JobMembership(
            cast(JoinedJob, job), Policy(), cast(Leadership, self), "10.0.0.2:1", lambda key: None
        )
        self.membership.follow_leader(0.0)

    def ask(self, question: Question, sequence: int) -> None:
        self.asked.append((question, sequence))

    def remove_dead_leader(self, *what: object) -> None:
        self.removed.append(what)

    def sees_agent(self, name: str, revision: int) -> None:
        self.membership.advance(
            ev.AgentSeen(
                now_s=1.0,
                agent_id=name,
                node_name=f"host-{name}",
                slots=1,
                topology="",
                leaving=False,
                control_address=f"{name}:1",
                join_revision=revision,
            )
        )

    def sees_member(self, worker_id: str) -> None:
        self.membership.advance(
            ev.MemberReady(
                now_s=1.0,
                worker_id=worker_id,
                agent_id=worker_id[0],
                slot=0,
                store_address="",
                fingerprint={},
                committed_generation=0,
                join_revision=9,
            )
        )

    def hears(self, verdict: ProbeVerdict) -> None:
        question, sequence = self.asked[-1]
        self.membership.take(ProbeResult(question.agent_id, sequence, False, verdict), 3.0)


@pytest.mark.parametrize("whole", [True, False], ids=["the whole picture", "a large job"])
def test_a_dead_leader_goes_with_what_this_agent_sees_of_it(whole: bool) -> None:
    agent = Agent()
    if whole:
        for name, revision in (("l", 7), ("me", 8)):
            agent.sees_agent(name, revision)
            agent.sees_member(f"{name[0]}.0")
    agent.membership.suspect_leader(2.0)
    agent.hears(ProbeVerdict.REFUSED)
    assert agent.removed == [("l", 40, 7, ["l.0"]) if whole else ("l", 40, 0, [])]
    assert agent.told == [
        f"the leader, {'host-l' if whole else 'l'}, refused the connection: its keys are removed and another is elected"
    ]


def test_a_leader_that_answers_keeps_its_keys() -> None:
    agent = Agent()
    agent.sees_agent("l", 7)
    agent.membership.suspect_leader(2.0)
    agent.hears(ProbeVerdict.ALIVE)
    assert agent.removed == [] and agent.told == []
