"""An agent removes the keys of a leader that it found dead: those that it sees, as they were when it asked."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import cast

import pytest

from bagua_agent.base.timers import Timers
from bagua_agent.etcd.keys import JobKeys
from bagua_agent.job.membership_driver import JobMembership
from bagua_agent.job_state.console import JobTerminal
from bagua_agent.job_state.context import JoinedJob
from bagua_agent.job_state.decode import LeaderKey
from bagua_agent.job_state.job_state import LocalJobState
from bagua_agent.leadership.leadership import Leadership
from bagua_agent.leadership.reports import Elected, ProbeResult, Touched
from bagua_agent.membership import events as ev
from bagua_agent.membership.actions import Question
from bagua_agent.membership.policy import Policy
from bagua_agent.membership.ranks import Chosen, assign
from bagua_agent.membership.view import (
    AgentView,
    JobView,
    MemberView,
    ProbeVerdict,
)
from bagua_agent.rpc.reachability import Reachability
from bagua_contract import membership_pb2 as pb
from bagua_contract.records import Generation, GenerationKind, Stage

LEADER = LeaderKey("l", "10.0.0.1:1", create_revision=40)


def generation(*agents: str) -> Generation:
    chosen = [Chosen(f"{a}.0.g1", a, f"host-{a}", 0, "", "", 1, 7, False) for a in agents]
    return Generation(1, 0, GenerationKind.RESTART, assign(chosen), "")


class Agent:
    """One that does not lead; stands for the leader's side of it too. removed: what was asked to be removed. results:
    what was asked to be written as the job's result."""

    def __init__(self, *, restarts: bool = False, replica_size: int = 1) -> None:
        self.asked: list[tuple[Question, int]] = []
        self.touched: list[dict[str, str]] = []
        self.removed: list[tuple[object, ...]] = []
        self.results: list[tuple[object, ...]] = []
        self.told: list[str] = []
        mode = pb.JobSpec.RESTART if restarts else pb.JobSpec.LIVE
        self.seen = seen = LocalJobState(
            spec=pb.JobSpec(mode=mode, replica_size=replica_size), view=JobView(), leader=LEADER
        )
        self.timers = Timers()
        self.election = self.writes = self.probes = self
        job = SimpleNamespace(
            agent_id="me",
            seen=seen,
            timers=self.timers,
            keys=JobKeys("job"),
            terminal=JobTerminal(lambda line: self.told.append(line.partition(" | ")[2]), "me"),
            history=SimpleNamespace(leader_is=lambda agent_id, leading: None),
        )
        self.membership = JobMembership(
            cast(JoinedJob, job), Policy(), cast(Leadership, self), "10.0.0.2:1", lambda key: None
        )
        self.membership.follow_leader(0.0)

    def ask(self, question: Question, sequence: int) -> None:
        self.asked.append((question, sequence))

    def touch(self, addresses: dict[str, str]) -> None:
        self.touched.append(addresses)

    def round(self, begins_s: float, **found: Reachability) -> None:
        """A round of touches that is due at begins_s and takes 0.2 s. found: what is reported."""
        before = len(self.touched)
        for due in self.timers.take_due(begins_s):
            due(begins_s)
        assert len(self.touched) == before + 1
        assert not self.timers.take_due(begins_s + 100.0), "one round at a time"
        self.membership.take(Touched(found), begins_s + 0.2)

    def remove_dead_leader(self, *what: object) -> None:
        self.removed.append(what)

    def write_result(self, *what: object) -> None:
        self.results.append(what)

    def sees_agent(self, name: str, revision: int, node_name: str = "") -> None:
        self.membership.advance(
            ev.AgentSeen(
                now_s=1.0,
                agent=AgentView(
                    agent_id=name,
                    node_name=node_name or f"host-{name}",
                    slots=1,
                    topology="",
                    leaving=False,
                    control_address=f"{name}:1",
                    join_revision=revision,
                ),
            )
        )

    def sees_member(self, worker_id: str, stage: Stage = Stage.LOOP) -> None:
        self.membership.advance(
            ev.MemberReady(
                now_s=1.0,
                member=MemberView(
                    worker_id=worker_id,
                    agent_id=worker_id[0],
                    slot=0,
                    store_address="",
                    fingerprint={},
                    committed_generation=0,
                    join_revision=9,
                    stage=stage,
                ),
            )
        )

    def hears(self, verdict: ProbeVerdict, now_s: float = 3.0) -> None:
        question, sequence = self.asked[-1]
        self.membership.take(ProbeResult(question.agent_id, sequence, False, verdict), now_s)


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


def test_each_leader_that_dies_is_told_once_also_if_nodes_have_the_same_name() -> None:
    agent = Agent()
    for name, revision in (("l", 7), ("m", 9)):
        agent.sees_agent(name, revision, node_name="host-l")
    for asked_s, leader in ((2.0, LEADER), (20.0, LEADER), (40.0, replace(LEADER, agent_id="m"))):
        agent.seen.leader = leader
        agent.membership.follow_leader(asked_s)
        agent.membership.suspect_leader(asked_s)
        agent.hears(ProbeVerdict.REFUSED, asked_s + 0.1)
    assert [what[0] for what in agent.removed] == ["l", "l", "m"]
    assert (
        agent.told
        == ["the leader, host-l, refused the connection: its keys are removed and another is elected"] * 2
    )


def test_without_etcd_no_other_leader_is_promised_yet() -> None:
    agent = Agent()
    agent.sees_agent("l", 7)
    agent.membership.store_answers = False
    agent.membership.suspect_leader(2.0)
    agent.hears(ProbeVerdict.REFUSED)
    assert agent.told == [
        "the leader, host-l, refused the connection: its keys are removed and another is elected once etcd answers"
    ]


def test_a_leader_that_answers_keeps_its_keys() -> None:
    agent = Agent()
    agent.sees_agent("l", 7)
    agent.membership.suspect_leader(2.0)
    agent.hears(ProbeVerdict.ALIVE)
    assert agent.removed == [] and agent.told == []


def test_in_restart_mode_the_leader_is_touched_in_rounds_and_asked_once_its_host_refuses() -> None:
    agent = Agent(restarts=True)
    agent.round(1.0, l=Reachability.ANSWERED)
    agent.round(1.5)  # said nothing
    assert agent.touched == [{"l": "10.0.0.1:1"}] * 2 and agent.asked == []
    agent.round(2.0, l=Reachability.REFUSED)
    [(question, _)] = agent.asked
    assert (question.agent_id, question.control_address) == ("l", "10.0.0.1:1")
    agent.hears(ProbeVerdict.REFUSED)
    assert [removed[0] for removed in agent.removed] == ["l"]


def test_in_restart_mode_a_silent_leader_is_asked_after_three_rounds_and_keeps_its_keys_if_it_answers() -> (
    None
):
    agent = Agent(restarts=True)
    agent.round(0.5, l=Reachability.ANSWERED)
    for number in range(3):
        assert agent.asked == []
        agent.round(1.0 + 0.5 * number, l=Reachability.SILENT)
    assert len(agent.asked) == 1
    agent.hears(ProbeVerdict.ALIVE)
    assert agent.removed == []


def test_touches_end_with_the_job_and_with_restart_mode() -> None:
    ended, became_live = Agent(restarts=True), Agent(restarts=True)
    ended.seen.result = pb.Result()
    became_live.seen.spec = pb.JobSpec(mode=pb.JobSpec.LIVE)
    for agent in (Agent(), ended, became_live):
        for due in agent.timers.take_due(100.0):
            due(100.0)
        assert agent.touched == [] and not agent.timers.take_due(1000.0)


def test_in_restart_mode_the_leader_touches_the_members_and_asks_those_in_doubt() -> None:
    agent = Agent(restarts=True)
    for name, revision in (("me", 7), ("a", 8), ("idle", 9)):
        agent.sees_agent(name, revision)
    agent.membership.advance(ev.ModeSeen(now_s=1.0, restarts=True))
    agent.membership.advance(ev.DesiredChanged(now_s=1.0, min_nodes=2, max_nodes=2))
    agent.membership.advance(ev.GenerationSeen(now_s=1.0, generation=generation("me", "a")))
    agent.membership.take(Elected(50), 1.0)
    agent.round(2.0, a=Reachability.ANSWERED, idle=Reachability.ANSWERED)
    agent.round(2.5, a=Reachability.REFUSED, idle=Reachability.REFUSED)
    assert agent.touched == [{"a": "a:1", "idle": "idle:1"}] * 2
    assert [question.agent_id for question, _ in agent.asked] == ["a"]
