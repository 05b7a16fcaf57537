"""A failure that another loss may explain does not end the job before all hosts are known to live."""

from __future__ import annotations

from dataclasses import replace

from pictures import LEADER, POLICY, agent, decided, failure, member, picture, record, workers, written

from bagua_agent.membership.actions import AskWhetherAlive, ResultOutcome, WriteResult
from bagua_agent.membership.view import Attempts, DeadAgent, Evidence, JobView, Probe

PEER_LOST = "RuntimeError: gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.0.0.2]:9"
ALIVE = replace(LEADER, alive_agents={"b": 10.0, "c": 10.0})


def job(**more: object) -> JobView:
    """c0's own group lost a peer at 10 s; the job may not fail once."""
    members = [member("a0", committed=2), member("b0", committed=2)]
    casualty = replace(failure("c0"), summary=PEER_LOST, seen_since_s=10.0)
    record_ = record(2, "a0 b0 c0")
    return picture([agent(n) for n in "abc"], members, record_, failures=[casualty], **more)  # type: ignore[arg-type]


def fails(view: JobView, now_s: float, evidence: Evidence) -> bool:
    action = decided(view, now_s=now_s, evidence=evidence).action
    return isinstance(action, WriteResult) and action.outcome is ResultOutcome.FAILED


def test_all_hosts_are_asked_first() -> None:
    assert decided(job(), now_s=10.0).action == AskWhetherAlive(("b", "c"))
    probes = {a: Probe(a, 1, 1, 10.0, "") for a in "bc"}
    asked = decided(job(), now_s=10.1, evidence=replace(LEADER, probes=probes))
    assert asked.action is None and asked.wake_at_s == 10.0 + 2 * POLICY.probe_window_s


def test_if_all_live_and_nothing_else_fails_the_job_ends() -> None:
    waits = decided(job(), now_s=10.1, evidence=ALIVE)
    assert waits.action is None and waits.wake_at_s == 10.0 + POLICY.blame_window_s
    assert fails(job(), 10.0 + POLICY.blame_window_s, ALIVE)


def test_a_host_that_is_gone_is_gone_on_without() -> None:
    evidence = replace(ALIVE, dead_agents={"b": DeadAgent("b", 2, 10.2, "refused the connection")})
    assert workers(written(decided(job(), now_s=10.2, evidence=evidence))) == "a0"
    keys_gone = {k: v for k, v in job().agents.items() if k != "b"}
    assert workers(written(decided(replace(job(), agents=keys_gone), now_s=10.2, evidence=ALIVE))) == "a0"


def test_its_agent_has_time_to_say_so() -> None:
    without_b = replace(job(), generation=record(3, "a0"), attempts=Attempts(0, 10.3))
    waits = decided(without_b, now_s=11.0, evidence=ALIVE)
    assert waits.action is None and waits.wake_at_s == 10.0 + POLICY.cause_window_s
    said = replace(without_b.failures["c0"], script_failure=False)
    assert not fails(replace(without_b, failures={"c0": said}), 11.0, ALIVE)
    assert fails(without_b, 10.1 + POLICY.cause_window_s, ALIVE)


def test_the_agent_of_a_worker_that_was_left_out_before_it_failed_has_as_long() -> None:
    """Its host was silent, and has come back: the generation without it is older than its failure."""
    left_out = replace(job(), generation=record(3, "a0 b0"), attempts=Attempts(0, 9.7))
    waits = decided(left_out, now_s=11.0, evidence=ALIVE)
    assert waits.action is None and waits.wake_at_s == 10.0 + POLICY.cause_window_s
    assert fails(left_out, 10.1 + POLICY.cause_window_s, ALIVE)


def test_what_was_looked_into_is_not_looked_into_again() -> None:
    """A new leader with an old casualty that used up the budget: the next real failure ends the job at once."""
    later = replace(failure("b0", order=2), seen_since_s=100.0)
    view = replace(job(), failures={**job().failures, "b0": later})
    assert fails(view, 100.0, LEADER)
