"""Whom to ask, through whom, and what the answers mean."""

from __future__ import annotations

from dataclasses import replace

import pytest
from pictures import LEADER, POLICY, agent, member, picture, record, suspicion

from bagua_agent.membership.detection import inquire, judge_probe, relay_for
from bagua_agent.membership.standing import stand
from bagua_agent.membership.view import DeadAgent, Evidence, JobView, Probe, SuspicionView, Verdict

ALIVE, REFUSED, UNANSWERED = Verdict


@pytest.mark.parametrize(
    ("relay", "direct", "relayed", "verdict"),
    [
        ("c", ALIVE, None, ALIVE),
        ("c", REFUSED, None, REFUSED),
        ("c", UNANSWERED, None, None),
        ("c", None, UNANSWERED, None),
        ("c", UNANSWERED, UNANSWERED, UNANSWERED),
        ("c", UNANSWERED, ALIVE, ALIVE),
        ("c", UNANSWERED, REFUSED, REFUSED),
        ("c", None, REFUSED, None),
        ("", UNANSWERED, None, UNANSWERED),
    ],
)
def test_verdicts(relay: str, direct: Verdict, relayed: Verdict, verdict: Verdict | None) -> None:
    judged = judge_probe(Probe("b", 2, 1, 0.0, relay, direct, relayed))
    assert (judged and judged[0]) == verdict


def job(*suspicions: SuspicionView) -> JobView:
    return picture(
        [agent(n) for n in "abcd"],
        [member(f"{n}0", committed=2) for n in "abcd"],
        record(2, "a0 b0 c0 d0"),
        suspicions=suspicions,
    )


def ask(view: JobView, evidence: Evidence = LEADER, now_s: float = 10.0):  # type: ignore[no-untyped-def]
    return inquire(view, stand(view, evidence, now_s, POLICY), evidence, now_s, POLICY)


@pytest.mark.parametrize("host", ["10.0.0.3", "10.0.0.3:99", "host-c"])
def test_those_named_are_asked_first_and_everybody_before_a_rebuild(host: str) -> None:
    view = job(replace(suspicion("a0", 2), hosts=(host,)))
    assert ask(view).ask == ("c",)
    alive = replace(LEADER, alive_agents={"c": 5.0})
    assert ask(view, alive).ask == ("b", "d")
    assert ask(view, replace(LEADER, alive_agents=dict.fromkeys("bcd", 5.0))).settled


def test_an_unknown_host_means_everybody_and_the_leader_never_asks_itself() -> None:
    assert ask(job(replace(suspicion("b0", 2), hosts=("10.9.9.9",)))).ask == ("b", "c", "d")


def test_a_question_under_way_is_awaited_and_given_up_after_two_windows() -> None:
    view = job(suspicion("a0", 2))
    evidence = replace(LEADER, probes={n: Probe(n, 1, 1, 9.5, "") for n in "bcd"})
    inquiry = ask(view, evidence)
    assert (inquiry.ask, inquiry.awaited, inquiry.again_at_s) == ((), ("b", "c", "d"), 10.5)
    assert ask(view, evidence, now_s=10.5).ask == ("b", "c", "d")


def test_evidence_of_a_stall_is_good_for_one_window() -> None:
    view = job(suspicion("a0", 2, broken=False, seen_s=9.0))
    assert ask(view, replace(LEADER, alive_agents=dict.fromkeys("bcd", 8.5))).settled
    assert ask(view, replace(LEADER, alive_agents=dict.fromkeys("bcd", 8.4))).ask == ("b", "c", "d")


def test_a_relay_is_neither_us_nor_the_target_nor_dead_and_rather_not_in_question() -> None:
    view = job()
    assert relay_for(view, LEADER, "b", ("b", "c")) == "d"
    dead = replace(LEADER, dead_agents={"d": DeadAgent("d", 4, 0.0, "refused")})
    assert relay_for(view, dead, "b", ("b", "c")) == "c"
    assert relay_for(picture([agent("a"), agent("b")], []), LEADER, "b", ("b",)) == ""
