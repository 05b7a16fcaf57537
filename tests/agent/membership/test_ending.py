"""The outcome of a job: rules 6 and 8."""

from __future__ import annotations

from dataclasses import replace

from pictures import LEADER, POLICY, agent, decided, departure, failure, member, picture, record

from bagua_agent.membership.actions import AskWhetherAlive, Decision, ResultOutcome, WriteResult
from bagua_agent.membership.view import JobView, Waiting


def outcome(decision: Decision) -> ResultOutcome | None:
    return decision.action.outcome if isinstance(decision.action, WriteResult) else None


def closing(*, members: tuple[str, ...] = ("a0", "b0", "c0"), finished: tuple[str, ...] = ()) -> JobView:
    return picture(
        [agent("a"), agent("b"), agent("c")],
        [member(w) for w in members],
        record(2, "a0 b0"),
        closing_generation=2,
        finished=frozenset(finished),
    )


def test_closing_forms_nothing_and_waits_for_the_workers_of_the_end() -> None:
    assert decided(closing()).reason == "closing: 2 of 2 workers have yet to end, as global rank 0 on host-a"
    assert decided(closing(members=("a0",))).action is None  # a loss now changes nothing
    assert outcome(decided(closing(members=(), finished=("a0", "b0")))) is ResultOutcome.SUCCEEDED


def test_newcomers_of_a_pending_generation_need_not_end() -> None:
    view = replace(closing(finished=("a0", "b0")), generation=record(3, "a0 b0 c0:3"), earlier=())
    assert outcome(decided(view)) is ResultOutcome.SUCCEEDED


def test_a_failure_after_the_end_fails_the_job_if_it_was_in() -> None:
    view = closing(finished=("a0",))
    assert (
        outcome(decided(replace(view, failures={"b0": failure("b0", script=False)}))) is ResultOutcome.FAILED
    )
    assert decided(replace(view, failures={"c0": failure("c0")})).action is None


def test_a_host_lost_after_the_end_is_waited_for_and_then_fails_the_job() -> None:
    view = closing(members=("a0",), finished=("a0",))
    view = replace(view, agents={k: v for k, v in view.agents.items() if k != "b"})
    decision = decided(view)
    assert decision.waiting is Waiting.ENDING and decision.wake_at_s == 70.0
    waited = replace(LEADER, waiting=Waiting.ENDING, waiting_since_s=10.0)
    assert outcome(decided(view, evidence=waited, now_s=70.0)) is ResultOutcome.FAILED


def test_a_worker_that_left_after_the_end_stops_the_job_and_is_no_failure() -> None:
    view = replace(closing(members=("a0",)), departures={"b0": departure("b0", 2)})
    assert decided(view).reason == "closing: 1 of 2 workers have yet to end, as global rank 0 on host-a"
    without = replace(view, agents={k: v for k, v in view.agents.items() if k != "b"})
    assert decided(without).reason == "closing: 1 of 2 workers have yet to end, as global rank 0 on host-a", (
        "its agent is not awaited"
    )
    decision = decided(replace(without, finished=frozenset({"a0"})))
    assert outcome(decision) is ResultOutcome.STOPPED
    assert "training was done, but global rank 1 on host-b left before its script ended" in decision.reason


def test_the_budget_ends_the_job() -> None:
    view = picture([agent("a")], [], record(2, "a0"), failures=[failure("a0")])
    decision = decided(view)
    assert outcome(decision) is ResultOutcome.FAILED
    assert decision.reason.endswith("1 script failure, none allowed: slot 0 on host-a (ValueError: bad)")


def test_holders_known_to_have_ended_are_not_waited_for() -> None:
    view = picture([agent("a")], [member("a0x")], record(2, "a0"), failures=[failure("a0", script=False)])
    assert outcome(decided(view)) is ResultOutcome.FAILED


def test_a_script_that_trains_nothing_succeeds_once_every_node_came_and_ended() -> None:
    view = picture([agent("a")], [], nodes=(2, 2), finished=frozenset({"a0"}))
    assert decided(view).action is None
    both = replace(view, agents={**view.agents, "b": agent("b")})
    assert decided(both).action is None
    assert outcome(decided(replace(both, finished=frozenset({"a0", "b0"})))) is ResultOutcome.SUCCEEDED


def test_workers_that_leave_their_loop_together_succeed_and_one_alone_is_no_loss() -> None:
    view = picture([agent("a"), agent("b")], [member("b0")], record(2, "a0 b0"), finished=frozenset({"a0"}))
    assert (
        decided(replace(view, committed_generation=2)).reason
        == "waiting: global rank 0 on host-a gone and no worker suspects them"
    )
    assert outcome(decided(replace(view, finished=frozenset({"a0", "b0"})))) is ResultOutcome.SUCCEEDED


def test_a_node_that_left_ends_with_0_and_that_is_no_success() -> None:
    view = picture([agent("a", leaving=True)], [], record(2, "a0"), departures={"a0": departure("a0", 2)})
    assert outcome(decided(view)) is ResultOutcome.STOPPED


def test_a_casualty_alone_is_waited_out_for_its_cause() -> None:
    casualty = replace(failure("a0"), summary="DistBackendError: NCCL error", seen_since_s=10.0)
    view = picture([agent("a"), agent("b")], [], record(2, "a0 b0"), failures=[casualty])
    assert decided(view, now_s=10.1).action == AskWhetherAlive(("b",)), (
        "a lost host shows as errors of its peers"
    )
    alive = replace(LEADER, alive_agents={"b": 10.1})
    waits = decided(view, now_s=10.2, evidence=alive)
    assert waits.action is None and waits.wake_at_s == 10.0 + POLICY.blame_window_s
    assert outcome(decided(view, now_s=11.0, evidence=alive)) is ResultOutcome.FAILED
    cause = replace(failure("b0", order=2), seen_since_s=10.1)
    known = decided(replace(view, failures={**view.failures, "b0": cause}), now_s=10.1)
    assert isinstance(known.action, WriteResult) and known.action.failure == cause


def test_a_leader_whose_own_key_is_not_there_ends_no_job_by_what_the_others_do() -> None:
    """Its lease ended, as that of an agent that was frozen: it may still train, or wait for nodes."""
    leaves, stays = agent("b", leaving=True), agent("a")
    alone = picture([leaves], [])
    assert decided(alone).action is None
    assert decided(replace(alone, agents={"a": stays, "b": leaves})).action is None
    both = replace(alone, agents={"a": replace(stays, leaving=True), "b": leaves})
    assert outcome(decided(both)) is ResultOutcome.STOPPED

    useless = picture([agent("b", slots=0)], [])
    assert decided(useless).action is None
    both = replace(useless, agents={"a": agent("a", slots=0), **useless.agents})
    assert outcome(decided(both)) is ResultOutcome.FAILED
