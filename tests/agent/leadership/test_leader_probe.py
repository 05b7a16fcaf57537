"""A leader that is gone is found out by the others: asked at most so often, removed only on proof."""

from __future__ import annotations

from typing import cast

import pytest

from bagua_agent.job_state.decode import LeaderKey
from bagua_agent.leadership.leader_probe import DeadLeader, LeaderWatch
from bagua_agent.leadership.probes import Probes
from bagua_agent.leadership.reports import ProbeResult
from bagua_agent.membership.actions import Question
from bagua_agent.membership.view import ProbeVerdict

ALIVE, REFUSED, UNANSWERED = ProbeVerdict.ALIVE, ProbeVerdict.REFUSED, ProbeVerdict.UNANSWERED
LEADER = LeaderKey("leader", "10.0.0.1:1", create_revision=40)
OTHER = LeaderKey("other", "10.0.0.2:1", create_revision=50)
RELAY = "10.0.0.3:1"
WINDOW_S = 0.5
AGENT_REVISION = 7


class FakeProbes:
    def __init__(self) -> None:
        self.asked: list[tuple[Question, int]] = []

    def ask(self, question: Question, sequence: int) -> None:
        self.asked.append((question, sequence))


class Watched:
    def __init__(self, leader: LeaderKey | None = LEADER) -> None:
        self.probes = FakeProbes()
        self.deaths: list[DeadLeader] = []
        self.asked_at_s = 0.0
        self.watch = LeaderWatch(cast(Probes, self.probes), WINDOW_S, self.deaths.append)
        self.watch.leader_is(leader)

    def suspect(self, relay: str, now_s: float, agent_revision: int = AGENT_REVISION) -> None:
        before = len(self.probes.asked)
        self.watch.suspect(relay, agent_revision, now_s)
        if len(self.probes.asked) > before:
            self.asked_at_s = now_s

    @property
    def removed(self) -> list[int]:
        return [death.create_revision for death in self.deaths]

    def answers(
        self,
        *verdicts: ProbeVerdict | None,
        agent_id: str = "leader",
        sequence: int | None = None,
        after_s: float = WINDOW_S,
    ) -> None:
        """To the last question: directly, then through the relay. None: that answer has not come."""
        last = self.probes.asked[-1][1] if sequence is None else sequence
        for verdict, relayed in zip(verdicts, (False, True), strict=False):
            if verdict is not None:
                assert self.watch.took(
                    ProbeResult(agent_id, last, relayed, verdict), self.asked_at_s + after_s
                )


def test_a_suspicion_asks_the_leader_directly_and_through_a_third() -> None:
    watched = Watched()
    watched.suspect(RELAY, 100.0)
    [(question, sequence)] = watched.probes.asked
    assert (question.agent_id, question.control_address) == ("leader", "10.0.0.1:1")
    assert question.relay_address == RELAY and question.relay_agent_id
    assert sequence < 0, "the membership machine's own questions have others"


def test_without_a_relay_it_asks_directly() -> None:
    watched = Watched()
    watched.suspect("", 100.0)
    assert watched.probes.asked[0][0].relay_agent_id == ""


@pytest.mark.parametrize(
    ("relay", "verdicts", "removed"),
    [
        (RELAY, (ALIVE, ALIVE), False),
        (RELAY, (REFUSED,), True),
        (RELAY, (ALIVE, REFUSED), False),  # it answered us, whatever others meet
        (RELAY, (UNANSWERED, REFUSED), True),
        (RELAY, (None, REFUSED), False),  # its own answer may be under way
        (RELAY, (None, UNANSWERED), False),
        (RELAY, (UNANSWERED,), False),  # the cut may be between the two of us
        (RELAY, (UNANSWERED, ALIVE), False),
        (RELAY, (ALIVE, UNANSWERED), False),
        (RELAY, (UNANSWERED, UNANSWERED), True),
        (RELAY, (REFUSED, REFUSED), True),
        ("", (UNANSWERED,), True),
        ("", (ALIVE,), False),
    ],
)
def test_its_key_is_removed_only_on_proof(
    relay: str, verdicts: tuple[ProbeVerdict, ...], removed: bool
) -> None:
    watched = Watched()
    watched.suspect(relay, 100.0)
    watched.answers(*verdicts)
    assert set(watched.removed) == ({LEADER.create_revision} if removed else set())


def test_suspicions_in_a_row_ask_once_and_later_again() -> None:
    watched = Watched()
    for now_s in (100.0, 100.1, 100.9):
        watched.suspect(RELAY, now_s)
    assert len(watched.probes.asked) == 1
    watched.suspect(RELAY, 100.0 + 2 * WINDOW_S)
    assert len(watched.probes.asked) == 2
    assert watched.probes.asked[0][1] != watched.probes.asked[1][1]


def test_silence_does_not_add_up_over_questions() -> None:
    watched = Watched()
    watched.suspect(RELAY, 100.0)
    first = watched.probes.asked[0][1]
    watched.answers(UNANSWERED)
    watched.suspect(RELAY, 102.0)
    watched.answers(None, UNANSWERED, sequence=first)  # the relay's answer to the first, late
    watched.answers(UNANSWERED)
    assert watched.removed == []
    watched.answers(None, UNANSWERED)
    assert watched.removed == [40]


def test_an_answer_about_a_leader_before_is_nothing() -> None:
    watched = Watched()
    watched.suspect(RELAY, 100.0)
    watched.watch.leader_is(OTHER)
    watched.answers(REFUSED, REFUSED)
    assert watched.removed == []


def test_the_same_agent_elected_again_has_another_key() -> None:
    watched = Watched()
    watched.suspect(RELAY, 100.0)
    watched.watch.leader_is(LeaderKey("leader", "10.0.0.1:1", create_revision=60))
    watched.answers(UNANSWERED, UNANSWERED)
    assert watched.removed == [], "what was asked before says nothing about the new key"


def test_a_new_leader_can_be_asked_at_once() -> None:
    watched = Watched()
    watched.suspect(RELAY, 100.0)
    watched.watch.leader_is(OTHER)
    watched.suspect(RELAY, 100.1)
    assert [question.agent_id for question, _ in watched.probes.asked] == ["leader", "other"]


def test_without_another_leader_no_agent_is_asked() -> None:
    watched = Watched(None)
    watched.suspect(RELAY, 100.0)
    assert watched.probes.asked == []


def test_answers_to_the_membership_machine_are_left_to_it() -> None:
    watched = Watched()
    assert not watched.watch.took(ProbeResult("leader", 3, False, REFUSED), 100.0)
    assert watched.removed == []


def test_a_death_is_told_with_the_agent_key_as_it_stood_when_it_was_asked() -> None:
    watched = Watched()
    watched.suspect(RELAY, 100.0)
    watched.suspect(RELAY, 100.1, agent_revision=90)  # it put its key again; that question was not asked
    watched.answers(UNANSWERED, UNANSWERED)
    [death] = watched.deaths
    assert (death.agent_id, death.agent_revision) == ("leader", AGENT_REVISION)
    assert death.how == "answered neither this agent nor a third agent"


@pytest.mark.parametrize(("verdict", "removed"), [(UNANSWERED, []), (REFUSED, [LEADER.create_revision])])
def test_silence_heard_too_late_proves_nothing(verdict: ProbeVerdict, removed: list[int]) -> None:
    """This agent was frozen meanwhile: answers came, and the deadlines passed first. A refusal is no matter of time."""
    watched = Watched()
    watched.suspect(RELAY, 100.0)
    watched.answers(verdict, verdict, after_s=2 * WINDOW_S + 0.01)
    assert watched.removed == removed
    watched.suspect(RELAY, 102.0)
    watched.answers(UNANSWERED, UNANSWERED)
    assert watched.removed == [*removed, LEADER.create_revision], "it is asked again"
