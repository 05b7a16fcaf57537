"""The shell's side of the leader: what is under way, what is stale, and what can't be."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bagua_agent.membership import events as ev
from bagua_agent.membership.actions import (
    ProbeAgents,
    RefuseMember,
    RemoveDeadAgent,
    WakeAt,
    WriteGeneration,
    WriteResult,
)
from bagua_agent.membership.policy import Policy
from bagua_agent.membership.state_machine.machine import (
    IllegalTransition,
    State,
    Transition,
    new_state,
    step,
    step_all,
)
from bagua_agent.membership.view import (
    AgentView,
    MemberView,
    ProbeVerdict,
    SuspicionView,
)
from bagua_contract.records import SuspicionKind

POLICY = Policy()


def agent(name: str, now_s: float = 0.0, revision: int | None = None) -> ev.AgentSeen:
    return ev.AgentSeen(
        now_s=now_s,
        agent=AgentView(
            agent_id=name,
            node_name=f"host-{name}",
            slots=1,
            topology="",
            leaving=False,
            control_address=f"{name}:1",
            join_revision=ord(name) if revision is None else revision,
        ),
    )


def ready(name: str, now_s: float = 0.0, model: str = "m", committed: int = 0) -> ev.MemberReady:
    return ev.MemberReady(
        now_s=now_s,
        member=MemberView(
            worker_id=f"{name}0",
            agent_id=name,
            slot=0,
            store_address=f"{name}:2",
            fingerprint={"model": model},
            committed_generation=committed,
            join_revision=100 + ord(name),
        ),
    )


def led(*happened: ev.Event, most: int = 3) -> Transition:
    start = (
        ev.DesiredChanged(now_s=0.0, min_nodes=1, max_nodes=most),
        agent("a"),
        agent("b"),
        agent("c"),
        ready("a"),
        ready("b"),
        ready("c"),
        ev.LeadershipWon(now_s=0.0, revision=1),
    )
    return step_all(new_state("a", "nonce"), (*start, *happened), POLICY)


def writes(outcome: Transition) -> list[WriteGeneration]:
    return [a for a in outcome.actions if isinstance(a, WriteGeneration)]


def in_force() -> State:
    """Generation 1 of a, b and c, all of whom have committed in it; time is 5."""
    outcome = led()
    (write,) = writes(outcome)
    assert write.generation.nonce == "nonce"
    seen = ev.GenerationSeen(now_s=1.0, generation=write.generation)
    commits = [ready(n, now_s=2.0, committed=1) for n in "abc"]
    return step_all(outcome.state, (seen, *commits, ev.TimePassed(now_s=5.0)), POLICY).state


def test_one_write_is_under_way_until_it_is_seen_or_refused() -> None:
    outcome = led()
    (write,) = writes(outcome)
    assert write.expected_previous_number == 0
    waiting = step(outcome.state, agent("d", now_s=1.0), POLICY)
    assert (waiting.actions, waiting.reason) == ((), "waiting: generation 1 is being written")
    seen = step(waiting.state, ev.GenerationSeen(now_s=1.0, generation=write.generation), POLICY)
    assert (
        seen.state.writing is None and seen.reason == "waiting: no worker has committed in generation 1 yet"
    )


def test_a_refused_write_is_tried_again_later_not_at_once() -> None:
    refused = step(led().state, ev.GenerationWriteRefused(now_s=1.0, number=1, why="etcd is away"), POLICY)
    assert refused.actions == (WakeAt(1.2),)
    assert refused.reason.startswith("the store refused the last write (etcd is away), then: generation 1")
    assert writes(step(refused.state, ev.TimePassed(now_s=1.2), POLICY))


def test_only_the_leader_acts() -> None:
    lost = step(led().state, ev.LeadershipLost(now_s=1.0), POLICY)
    assert lost.actions == ()
    assert step(lost.state, ev.MemberGone(now_s=1.0, worker_id="b0"), POLICY).actions == ()
    again = step(lost.state, ev.LeadershipWon(now_s=2.0, revision=9), POLICY)
    assert writes(again)
    assert step(again.state, ev.ResultSeen(now_s=2.0), POLICY).actions == ()


def test_a_dead_agent_is_asked_about_removed_and_lost() -> None:
    suspected = step(
        in_force(),
        ev.SuspicionRaised(
            now_s=5.0,
            suspicion=SuspicionView(
                worker_id="a0", generation=1, kind=SuspicionKind.BROKEN, hosts=("b",), sequence=1
            ),
        ),
        POLICY,
    )
    (probe,) = [a for a in suspected.actions if isinstance(a, ProbeAgents)]
    assert probe.agent_ids == ("b",) and probe.questions[0].relay_address == "c:1"
    assert WakeAt(6.0) in suspected.actions
    silent = ev.ProbeAnswered(
        now_s=5.5, agent_id="b", sequence=probe.sequence, verdict=ProbeVerdict.UNANSWERED
    )
    half = step(suspected.state, silent, POLICY)
    assert half.actions == (), half.reason
    relayed = ev.ProbeAnswered(
        now_s=5.5, agent_id="b", sequence=probe.sequence, verdict=ProbeVerdict.UNANSWERED, relayed=True
    )
    dead = step(half.state, relayed, POLICY)
    assert RemoveDeadAgent("b", ord("b")) in dead.actions
    (write,) = writes(dead)
    assert [m.worker_id for m in write.generation.members] == ["a0", "c0"]
    assert RemoveDeadAgent("b", ord("b")) not in step(dead.state, ev.TimePassed(now_s=6.0), POLICY).actions
    assert RemoveDeadAgent("b", ord("b")) in step(dead.state, ev.TimePassed(now_s=6.5), POLICY).actions
    late = step(dead.state, silent, POLICY)
    assert late.reason.startswith("ignored: b answered question 1, which is settled") or not late.actions


def test_an_agent_that_lives_can_tell_of_a_dead_worker() -> None:
    suspected = step(
        in_force(),
        ev.SuspicionRaised(
            now_s=5.0,
            suspicion=SuspicionView(
                worker_id="a0", generation=1, kind=SuspicionKind.BROKEN, hosts=("b",), sequence=1
            ),
        ),
        POLICY,
    )
    alive = ev.ProbeAnswered(now_s=5.1, agent_id="b", sequence=1, verdict=ProbeVerdict.ALIVE, workers=())
    (write,) = writes(step(suspected.state, alive, POLICY))
    assert [m.worker_id for m in write.generation.members] == ["a0", "c0"]


def test_a_worker_that_does_not_fit_is_refused_with_the_difference_until_it_stands_in_the_store() -> None:
    refuse = RefuseMember("d0", "model: the job has 'm', this worker 'n'")
    other = step_all(in_force(), (agent("d", now_s=5.0), ready("d", now_s=5.0, model="n")), POLICY)
    assert other.actions == (refuse, WakeAt(6.0))
    assert step(other.state, ev.TimePassed(now_s=5.9), POLICY).actions == ()
    again = step(other.state, ev.TimePassed(now_s=6.0), POLICY)  # the first write was lost
    assert again.actions == (refuse, WakeAt(7.0))
    stands = step(again.state, ev.MemberRefused(now_s=6.1, worker_id="d0"), POLICY)
    assert stands.actions == () and step(stands.state, ev.TimePassed(now_s=9.0), POLICY).actions == ()


def test_a_refusal_is_retried_while_a_generation_is_being_written() -> None:
    late = step_all(led().state, (agent("d", now_s=1.0), ready("d", now_s=1.0, model="n")), POLICY)
    assert [type(a) for a in late.actions] == [RefuseMember, WakeAt]
    again = step(late.state, ev.TimePassed(now_s=2.0), POLICY)
    assert [type(a) for a in again.actions] == [RefuseMember, WakeAt]


def test_the_result_is_written_once() -> None:
    ended = [ev.WorkerFinished(now_s=6.0, worker_id=f"{n}0") for n in "abc"]
    closed = step_all(in_force(), (ev.ClosingSeen(now_s=6.0, generation=1), *ended), POLICY)
    assert [type(a) for a in closed.actions] == [WriteResult]
    assert (
        step(closed.state, ev.TimePassed(now_s=7.0), POLICY).reason == "waiting: the result is being written"
    )


def test_stale_events_are_ignored_with_a_reason() -> None:
    state = in_force()
    first = state.view.generation
    assert first is not None
    same = step(state, ev.GenerationSeen(now_s=5.0, generation=first), POLICY)
    assert same.reason.startswith("ignored: generation 1 is known")
    late = step(state, ev.GenerationWriteRefused(now_s=5.0, number=1, why="late"), POLICY)
    assert late.reason.startswith("ignored: answer to an earlier write")


@pytest.mark.parametrize(
    "event",
    [
        ev.TimePassed(now_s=4.9),
        ev.LeadershipWon(now_s=5.0, revision=2),
        ev.GenerationWriteRefused(now_s=5.0, number=7, why=""),
        ev.ProbeAnswered(now_s=5.0, agent_id="b", sequence=1, verdict=ProbeVerdict.ALIVE),
    ],
    ids=["time goes back", "elected twice", "no such write", "never asked"],
)
def test_what_cannot_be_raises_with_the_story(event: ev.Event) -> None:
    with pytest.raises(IllegalTransition) as raised:
        step(in_force(), event, POLICY)
    assert raised.value.event == event
    assert "before, oldest first:" in str(raised.value) and "MemberReady" in str(raised.value)


def test_another_record_of_the_number_in_force_is_passed_over() -> None:
    state = in_force()
    different = writes(led(most=2))[0].generation
    assert state.view.generation is not None and state.view.generation.number == different.number
    taken = step(state, ev.GenerationSeen(now_s=5.0, generation=different), POLICY)
    assert taken.state.view.generation == state.view.generation and not taken.actions


def test_a_record_of_another_job_is_passed_over() -> None:
    state = in_force()
    assert state.view.generation is not None
    theirs = replace(state.view.generation, number=9, nonce="another job's")
    taken = step(state, ev.GenerationSeen(now_s=5.0, generation=theirs), POLICY)
    assert taken.state.view.generation == state.view.generation and not taken.actions
