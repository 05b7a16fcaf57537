"""The outcome of a job: rules 6 and 8."""

from __future__ import annotations

from dataclasses import replace

import pytest
from pictures import LEADER, POLICY, agent, decided, departure, failure, member, picture, record

from bagua_agent.membership import events as ev
from bagua_agent.membership.actions import AskWhetherAlive, Decision, ResultOutcome, WriteResult
from bagua_agent.membership.state_machine.picture import absorb
from bagua_agent.membership.view import Desired, JobView, Waiting
from bagua_contract.records import GenerationKind


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


JOB_CLOSING = "bagua_core.elastic.script_collectives.members_changed.JobClosing: allreduce: a worker is lost"


def test_workers_that_miss_one_that_left_after_the_end_do_not_fail_the_job() -> None:
    missed = replace(failure("a0"), summary=JOB_CLOSING)
    view = replace(closing(members=("b0",)), failures={"a0": missed})
    assert outcome(decided(view)) is ResultOutcome.FAILED, "no node leaves"
    leaving = replace(view, agents={**view.agents, "b": agent("b", leaving=True)})
    assert decided(leaving).reason == "closing: 1 of 2 workers have yet to end, as global rank 1 on host-b"
    left = replace(leaving, members={}, departures={"b0": departure("b0", 2)})
    assert outcome(decided(left)) is ResultOutcome.STOPPED
    cut_short = seen(replace(leaving, members={}), ev.AgentGone(now_s=2.0, agent_id="b"))
    assert outcome(decided(cut_short)) is ResultOutcome.STOPPED, "its grace period was over"
    lost = seen(replace(view, members={}), ev.AgentGone(now_s=2.0, agent_id="b"))
    assert outcome(decided(lost)) is ResultOutcome.FAILED
    finished_first = replace(leaving, members={}, finished=frozenset({"b0"}))
    assert outcome(decided(finished_first)) is ResultOutcome.FAILED
    by_itself = replace(left, failures={"a0": failure("a0")})
    assert outcome(decided(by_itself)) is ResultOutcome.FAILED


def test_the_budget_ends_the_job() -> None:
    view = picture([agent("a")], [], record(2, "a0"), failures=[failure("a0")])
    decision = decided(view)
    assert outcome(decision) is ResultOutcome.FAILED
    assert decision.reason.endswith("1 script failure, none allowed: slot 0 on host-a (ValueError: bad)")


def test_holders_known_to_have_ended_are_not_waited_for() -> None:
    view = picture([agent("a")], [member("a0x")], record(2, "a0"), failures=[failure("a0", script=False)])
    assert outcome(decided(view)) is ResultOutcome.FAILED


def test_a_script_that_trains_nothing_succeeds_once_every_node_came_and_ended() -> None:
    view = seen(picture([agent("a")], [], nodes=(2, 2)), finished("a0"))
    assert decided(view).action is None
    both = replace(view, agents={**view.agents, "b": agent("b")})
    assert decided(both).action is None
    assert outcome(decided(seen(both, finished("b0")))) is ResultOutcome.SUCCEEDED


def ended_early(slots: int) -> JobView:
    """Before any record. The worker of host-b in slot 0 has ended with 0, and one of host-a runs."""
    view = picture([agent("a"), agent("b", slots=slots)], [], nodes=(2, 2))
    ended = ev.WorkerFinished(
        now_s=1.0, worker_id="b0", before_joining=True, agent_id="b", node_name="host-b"
    )
    return seen(view, ended)


def seen(view: JobView, event: ev.Event) -> JobView:
    return absorb(view, LEADER, event, 1)[0]


def test_a_node_that_trained_nothing_may_leave_before_the_others_end() -> None:
    view = ended_early(slots=1)
    leaving = replace(view, agents={**view.agents, "b": agent("b", leaving=True)})
    gone = seen(view, ev.AgentGone(now_s=2.0, agent_id="b"))
    for before in (view, leaving, gone):
        assert decided(before).action is None
        elastic = replace(before, desired=Desired(1, 2))
        assert decided(elastic).action is None, "the worker of host-a still runs"
        ended = seen(before, ev.WorkerFinished(now_s=3.0, worker_id="a0", before_joining=True, agent_id="a"))
        assert outcome(decided(ended)) is ResultOutcome.SUCCEEDED


def test_a_node_that_was_lost_before_all_its_workers_ended_is_not_done() -> None:
    view = seen(ended_early(slots=2), ev.AgentGone(now_s=2.0, agent_id="b"))
    ended = seen(view, ev.WorkerFinished(now_s=3.0, worker_id="a0", before_joining=True, agent_id="a"))
    assert decided(ended).action is None


@pytest.mark.parametrize("first_joined", [False, True])
def test_workers_of_a_node_that_has_gone_do_not_count_for_one_that_stays(first_joined: bool) -> None:
    view = picture([agent("a"), agent("b")], [], nodes=(1, 2))
    view = seen(view, finished("b0", before_joining=not first_joined))
    gone = seen(view, ev.AgentGone(now_s=2.0, agent_id="b"))
    for before in (view, gone):
        assert decided(before).action is None, "the worker of host-a still runs"
        assert outcome(decided(seen(before, finished("a0")))) is ResultOutcome.SUCCEEDED


def test_workers_that_ended_on_one_node_do_not_count_for_another_that_stays() -> None:
    view = picture([agent("a", slots=2), agent("b")], [], nodes=(2, 2))
    early = [finished("b0"), finished("a0"), finished("a1")]
    for event in early[:2]:
        view = seen(view, event)
    assert decided(view).action is None
    assert outcome(decided(seen(view, early[2]))) is ResultOutcome.SUCCEEDED


def finished(worker: str, *, before_joining: bool = True) -> ev.WorkerFinished:
    return ev.WorkerFinished(
        now_s=1.0,
        worker_id=worker,
        before_joining=before_joining,
        agent_id=worker[0],
        node_name=f"host-{worker[0]}",
    )


def test_workers_that_leave_their_loop_together_succeed_and_one_alone_is_no_loss() -> None:
    view = picture([agent("a"), agent("b")], [member("b0")], record(2, "a0 b0"), finished=frozenset({"a0"}))
    assert (
        decided(replace(view, committed_generation=2)).reason
        == "waiting: global rank 0 on host-a gone and no worker suspects them"
    )
    assert outcome(decided(replace(view, finished=frozenset({"a0", "b0"})))) is ResultOutcome.SUCCEEDED


@pytest.mark.parametrize("kind", [GenerationKind.GATHERING, GenerationKind.PLANNED])
def test_a_node_whose_workers_ended_well_may_leave_before_the_others_end(kind: GenerationKind) -> None:
    """Scripts that train nothing, and those whose workers end past `bagua.shutdown()`."""
    record_ = record(1, "a0 b0", kind=kind, base=0)
    view = picture([agent("a"), agent("b")], [member("a0")], record_, finished=frozenset({"b0"}))
    leaving = replace(view, agents={"a": agent("a"), "b": agent("b", leaving=True)})
    alone = replace(view, agents={"a": agent("a")})
    for before in (view, leaving, alone):
        assert decided(before).action is None
        both = replace(before, members={}, finished=frozenset({"a0", "b0"}))
        assert outcome(decided(both)) is ResultOutcome.SUCCEEDED


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
