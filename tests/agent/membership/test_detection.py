"""The agents to probe, the relays, and the meaning of the answers."""

from __future__ import annotations

from dataclasses import replace

import pytest
from pictures import LEADER, POLICY, agent, member, picture, record, suspicion

from bagua_agent.membership.failures.detection import gathering_until_s, inquire, judge_probe, relays_for
from bagua_agent.membership.job_condition import job_condition
from bagua_agent.membership.view import DeadAgent, Evidence, JobView, Probe, ProbeVerdict, SuspicionView

ALIVE, REFUSED, UNANSWERED = ProbeVerdict


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
def test_verdicts(
    relay: str, direct: ProbeVerdict, relayed: ProbeVerdict, verdict: ProbeVerdict | None
) -> None:
    judged = judge_probe(Probe("b", 2, 1, 0.0, relay, direct, relayed), "the leader")
    assert (judged and judged[0]) == verdict


def test_a_verdict_names_both_agents_that_asked() -> None:
    unanswered = judge_probe(Probe("b", 2, 1, 0.0, "c", UNANSWERED, UNANSWERED), "the leader", "h3")
    assert unanswered == (UNANSWERED, "answered neither the leader nor h3")


def job(*suspicions: SuspicionView) -> JobView:
    return picture(
        [agent(n) for n in "abcd"],
        [member(f"{n}0", committed=2) for n in "abcd"],
        record(2, "a0 b0 c0 d0"),
        suspicions=suspicions,
    )


def ask(view: JobView, evidence: Evidence = LEADER, now_s: float = 10.0):  # type: ignore[no-untyped-def]
    return inquire(view, job_condition(view, evidence, now_s, POLICY), evidence, now_s, POLICY)


@pytest.mark.parametrize("host", ["10.0.0.3", "10.0.0.3:99", "host-c"])
def test_those_named_are_asked_first_and_all_before_a_rebuild(host: str) -> None:
    view = job(replace(suspicion("a0", 2), hosts=(host,)))
    assert ask(view).ask == ("c",)
    alive = replace(LEADER, alive_agents={"c": 5.0})
    assert ask(view, alive).ask == ("b", "d")
    assert ask(view, replace(LEADER, alive_agents=dict.fromkeys("bcd", 5.0))).settled


def test_an_unknown_host_means_all_and_the_leader_never_asks_itself() -> None:
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
    assert relays_for(view, LEADER, ("b", "c")) == {"b": "d", "c": "d"}
    dead = replace(LEADER, dead_agents={"d": DeadAgent("d", 4, 0.0, "refused")})
    assert relays_for(view, dead, ("b", "c")) == {"b": "c", "c": "b"}
    assert relays_for(picture([agent("a"), agent("b")], []), LEADER, ("b",)) == {"b": ""}


MANY = [chr(0x4E00 + i) for i in range(1000)]  # an agent is a letter here


def rack(lost: int, size: int, told_s: float = 10.0) -> tuple[JobView, Evidence]:
    """A generation of `size` whose members miss the first `lost` agents, of which the first is known to be dead and the
    others are asked."""
    names = MANY[:size]
    told = suspicion(f"{names[-1]}0", 2, seen_s=told_s)
    hosts = tuple(f"host-{n}" for n in names[:lost])
    view = picture(
        [agent(n) for n in names],
        [member(f"{n}0", committed=2) for n in names],
        record(2, " ".join(f"{n}0" for n in names)),
        suspicions=[replace(told, hosts=hosts, broken_since_s=told_s)],
    )
    probes = {n: Probe(n, 1, 1, told_s, "") for n in names[1:lost]}
    dead = {names[0]: DeadAgent(names[0], view.agents[names[0]].join_revision, told_s, "refused")}
    return view, replace(LEADER, observer_agent_id=names[-1], probes=probes, dead_agents=dead)


def waits_until(view: JobView, evidence: Evidence, now_s: float) -> float | None:
    return gathering_until_s(view, job_condition(view, evidence, now_s, POLICY), evidence, now_s, POLICY)


def test_losses_of_a_rack_are_gathered_into_one_generation() -> None:
    view, evidence = rack(lost=3, size=20)
    until_s = waits_until(view, evidence, 10.0)
    assert until_s == pytest.approx(10.0 + max(POLICY.gather_each_s * 20, POLICY.answer_each_s * 2))
    assert waits_until(view, evidence, until_s) is None, "not without end"
    answered = replace(evidence, probes={})
    told_s = waits_until(view, answered, 10.0)
    assert told_s == pytest.approx(10.0 + POLICY.gather_each_s * 20), "members may still tell of others"
    assert waits_until(view, answered, 10.0 + 1.01 * POLICY.gather_each_s * 20) is None


def test_a_silent_agent_is_not_waited_for_longer_than_the_probe_window() -> None:
    view, evidence = rack(lost=900, size=1000)
    until_s = waits_until(view, evidence, 10.0)
    assert until_s is not None and until_s - 10.0 <= POLICY.probe_window_s


def test_a_small_job_hardly_waits() -> None:
    view, evidence = rack(lost=1, size=4)
    until_s = waits_until(view, evidence, 10.0)
    assert until_s is not None and until_s - 10.0 < 0.001


def test_relays_of_many_questions_are_shared_out() -> None:
    view, evidence = rack(lost=30, size=60)
    relays = relays_for(view, evidence, MANY[:30])
    used = set(relays.values())
    assert len(used) >= 2 and "" not in used
    assert not used & set(MANY[:30]), "those in question are not asked to ask"
    assert evidence.observer_agent_id not in used
