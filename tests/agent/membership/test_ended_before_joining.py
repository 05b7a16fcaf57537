"""A worker ends with 0 before it asks to join a job that has not trained."""

from __future__ import annotations

from dataclasses import replace

from pictures import POLICY, agent, decided, member, picture, record, workers, written

from bagua_agent.membership.actions import ResultOutcome, WriteResult
from bagua_agent.membership.ended_before_joining import expected
from bagua_agent.membership.view import EndedBeforeJoining, JobView
from bagua_contract.records import Stage

LIMITED = replace(POLICY, join_timeout_s=20.0)
SEEN_S = 100.0


def with_end(view: JobView, *agent_ids: str) -> JobView:
    ended = {f"{a}0": EndedBeforeJoining(a, f"host-{a}", SEEN_S) for a in agent_ids}
    return replace(view, ended_before_joining=ended, finished=frozenset(ended))


def test_with_too_few_nodes_the_job_says_so_and_fails_after_the_join_timeout() -> None:
    for stage in (Stage.LOOP, Stage.WAITING):
        there = replace(member("a0"), stage=stage)
        view = with_end(picture([agent("a"), agent("b")], [there], nodes=(2, 2)), "b")
        waits = decided(view, now_s=SEEN_S + 1.0, policy=LIMITED)
        assert waits.action is None and waits.wake_at_s == SEEN_S + 20.0
        assert "a worker on host-b ended with 0 before it joined the job" in waits.reason
        assert "fails 20 s after that" in waits.reason
        fails = decided(view, now_s=SEEN_S + 20.0, policy=LIMITED)
        assert isinstance(fails.action, WriteResult) and fails.action.outcome is ResultOutcome.FAILED
        assert "too few nodes: 1 of 2" in fails.reason and "host-b" in fails.reason


def test_without_a_limit_it_waits() -> None:
    view = with_end(picture([agent("a"), agent("b")], [member("a0")], nodes=(2, 2)), "b")
    waits = decided(view, now_s=1e9, policy=replace(POLICY, join_timeout_s=None))
    assert waits.action is None and "without limit" in waits.reason


def test_a_gathering_does_not_wait_for_a_node_that_is_never_complete() -> None:
    view = picture([agent("a"), agent("b")], [replace(member("a0"), stage=Stage.WAITING)])
    assert decided(view, now_s=SEEN_S).action is None
    assert workers(written(decided(with_end(view, "b"), now_s=SEEN_S))) == "a0"


def test_of_a_job_that_trains_and_of_a_node_that_left_nothing_is_said() -> None:
    view = picture([agent("a"), agent("b")], [member("a0")], record(1, "a0"))
    assert expected(with_end(view, "b"), LIMITED) == ""
    view = picture([agent("a")], [member("a0")])
    assert expected(with_end(view, "b"), LIMITED) == ""
