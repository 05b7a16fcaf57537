"""The effect of a changed key on the leader's view: restart mode's part."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from bagua_agent.membership import events as ev
from bagua_agent.membership.actions import ProbeAgents, RemoveDeadAgent, WriteGeneration
from bagua_agent.membership.policy import Policy
from bagua_agent.membership.state_machine.machine import State, Transition, new_state, step, step_all
from bagua_agent.membership.state_machine.picture import absorb
from bagua_agent.membership.state_machine.restarting import worker_id_of
from bagua_agent.membership.view import (
    AgentView,
    Evidence,
    JobView,
    MemberView,
    ProbeVerdict,
    Run,
)
from bagua_contract.records import Generation, GenerationKind, Placement

POLICY = Policy(last_call_s=0.0)
PLANNED, RESTART = GenerationKind.PLANNED, GenerationKind.RESTART


def seen(view: JobView, event: ev.Event) -> tuple[JobView, str]:
    """The picture that knows of `event`, and why it was ignored, if it was."""
    after, _, note = absorb(view, Evidence(observer_agent_id="a"), event, next_sequence=1)
    return after, note


def record(number: int, kind: GenerationKind = RESTART, nonce: str = "") -> Generation:
    worker_id = worker_id_of("a", 0, number) if kind is RESTART else "a0"
    member = Placement(worker_id, "a", "host-a", 0, 0, 0, 0, "", number, 1, False)
    return Generation(number=number, base=0, kind=kind, members=(member,), nonce=nonce)


def agent(now_s: float = 0.0, name: str = "a", **changes: Any) -> ev.AgentSeen:
    values: dict[str, Any] = {
        "agent_id": name,
        "node_name": f"host-{name}",
        "slots": 1,
        "topology": "",
        "leaving": False,
        "control_address": f"{name}:1",
        "join_revision": 7,
        "ready": True,
    }
    return ev.AgentSeen(now_s=now_s, agent=AgentView(**{**values, **changes}))


# -- agents that are gone


def test_a_gone_agent_is_known_as_it_stood_while_the_record_lists_it() -> None:
    view = JobView(restarts=True)
    for event in (
        agent(),
        agent(name="b"),
        ev.GenerationSeen(now_s=0.0, generation=record(1)),
        ev.AgentGone(now_s=1.0, agent_id="a"),
        ev.AgentGone(now_s=1.0, agent_id="b"),
    ):
        view, _ = seen(view, event)
    assert set(view.gone) == {"a"}, "the record does not list b"
    assert view.known_agent("a").control_address == "a:1"
    back, _ = seen(view, agent(2.0, join_revision=9))
    assert not back.gone and back.known_agent("a").join_revision == 9
    without = replace(record(2), members=())
    over, _ = seen(view, ev.GenerationSeen(now_s=2.0, generation=without))
    assert not over.gone


def test_a_gone_agent_that_is_asked_and_silent_is_dead_until_it_puts_its_key_anew() -> None:
    outcome = step_all(
        new_state("z", restarts=True),
        (
            ev.DesiredChanged(now_s=0.0, min_nodes=1, max_nodes=2),
            agent(),
            agent(name="b", join_revision=8),
            ev.GenerationSeen(now_s=0.0, generation=record(1)),
            ev.AgentGone(now_s=1.0, agent_id="a"),
            ev.LeadershipWon(now_s=1.0, revision=9),
        ),
        POLICY,
    )
    [asked] = [a for a in outcome.actions if isinstance(a, ProbeAgents)]
    assert [(q.agent_id, q.control_address, q.relay_agent_id) for q in asked.questions] == [("a", "a:1", "b")]
    state = outcome.state
    for relayed in (False, True):
        answer = ev.ProbeAnswered(
            now_s=1.5, agent_id="a", sequence=asked.sequence, verdict=ProbeVerdict.UNANSWERED, relayed=relayed
        )
        outcome = step(state, answer, POLICY)
        state = outcome.state
    assert [m.agent_id for m in write_of(outcome).members] == ["b"]
    assert not any(isinstance(a, RemoveDeadAgent) for a in outcome.actions), "nothing stands to remove"
    later = step(state, agent(2.0, join_revision=12), POLICY).state
    assert not later.evidence.is_dead(later.view.agents["a"])


# -- since when a node is ready, and how long it has run: said again with every other change of its key


def after_agent(*puts: ev.AgentSeen) -> AgentView:
    view = JobView()
    for put in puts:
        view, note = seen(view, put)
        assert note == ""
    return view.agents["a"]


def test_a_node_is_ready_since_it_first_said_so() -> None:
    first = agent(5.0)
    assert after_agent(first).ready_since_s == 5.0
    again = agent(8.0, leaving=True, slots=2, run_generation=1, run=Run.RUNNING)
    assert after_agent(first, again).ready_since_s == 5.0


@pytest.mark.parametrize(
    "between",
    [
        pytest.param((agent(5.0, ready=False),), id="it was not ready before"),
        pytest.param((agent(4.0), agent(5.0, ready=False)), id="it was not ready in between"),
        pytest.param((agent(5.0, join_revision=3),), id="the key is another agent process's"),
    ],
)
def test_a_node_that_becomes_ready_is_so_from_now_on(between: tuple[ev.AgentSeen, ...]) -> None:
    assert after_agent(*between, agent(8.0)).ready_since_s == 8.0


def test_a_run_lasts_since_it_was_first_told() -> None:
    first = agent(5.0, run_generation=2, run=Run.FAILED)
    assert after_agent(first).run_since_s == 5.0
    again = agent(8.0, run_generation=2, run=Run.FAILED, leaving=True, ready=False)
    assert after_agent(first, again).run_since_s == 5.0


@pytest.mark.parametrize(
    "change",
    [
        {"run": Run.ENDING},
        {"run_generation": 3},
        {"join_revision": 9},
    ],
    ids=["another state", "another generation", "a key put anew"],
)
def test_another_run_begins_now(change: dict[str, Any]) -> None:
    first = {"run_generation": 2, "run": Run.FAILED}
    assert after_agent(agent(5.0, **first), agent(8.0, **{**first, **change})).run_since_s == 8.0


# -- a job becomes live


def test_a_record_of_restart_mode_means_nothing_to_a_live_job_but_that_its_number_is_used() -> None:
    view = JobView(restarts=True)
    empty = replace(record(2), members=())
    for generation in (record(1), empty):
        view, note = seen(view, ev.GenerationSeen(now_s=1.0, generation=generation))
        assert note == ""
    assert (view.generation, view.earlier) == (empty, (record(1),))
    live, _ = seen(view, ev.ModeSeen(now_s=2.0, restarts=False))
    assert not live.restarts
    assert (live.generation, live.earlier) == (None, ())
    assert (live.replaced_number, live.generation_number) == (2, 2)


def test_a_record_of_restart_mode_that_comes_after_the_change_is_not_followed() -> None:
    """A leader that had not received the change wrote it, or this agent reads the store for the first time."""
    view, _ = seen(JobView(restarts=True), ev.GenerationSeen(now_s=1.0, generation=record(1)))
    view, _ = seen(view, ev.ModeSeen(now_s=2.0, restarts=False))
    for before in (view, JobView()):
        late, note = seen(before, ev.GenerationSeen(now_s=2.1, generation=record(2)))
        assert note == "ignored: the job has become live"
        assert (late.generation, late.generation_number) == (None, 2)


def test_a_record_of_restart_mode_of_another_job_uses_no_number() -> None:
    late, note = seen(
        JobView(nonce="ours"), ev.GenerationSeen(now_s=1.0, generation=record(9, nonce="theirs"))
    )
    assert "of another job" in note
    assert late.generation_number == 0


def test_ends_of_workers_in_restart_mode_are_none_of_a_live_job() -> None:
    """One that became live runs its script anew on every node."""
    ended = ev.WorkerFinished(now_s=1.0, worker_id="a.0.g1", agent_id="a", generation=1)
    view = absorb(JobView(restarts=True), Evidence("a"), ended, 0)[0]
    assert (view.finished, view.finished_restarted) == (frozenset(), {"a.0.g1"})


@pytest.mark.parametrize("kind", [PLANNED, RESTART])
def test_the_mode_said_again_changes_nothing(kind: GenerationKind) -> None:
    restarts = kind is RESTART
    view, _ = seen(JobView(restarts=restarts), ev.GenerationSeen(now_s=1.0, generation=record(1, kind)))
    assert seen(view, ev.ModeSeen(now_s=2.0, restarts=restarts)) == (view, "")


def test_a_job_without_a_record_changes_its_mode() -> None:
    view, _ = seen(JobView(), ev.ModeSeen(now_s=1.0, restarts=True))
    assert view == JobView(restarts=True)
    view, _ = seen(view, ev.ModeSeen(now_s=2.0, restarts=False))
    assert view == JobView()


# -- what the leader makes of it


def leads(restarts: bool, *happened: ev.Event) -> Transition:
    """Of one node that wants no more, with one worker that has a session."""
    start = (
        ev.DesiredChanged(now_s=0.0, min_nodes=1, max_nodes=1),
        agent(),
        ev.MemberReady(
            now_s=0.0,
            member=MemberView(
                worker_id="a0",
                agent_id="a",
                slot=0,
                store_address="a:2",
                fingerprint={},
                committed_generation=0,
                join_revision=8,
            ),
        ),
        ev.LeadershipWon(now_s=0.0, revision=1),
    )
    return step_all(new_state("a", restarts=restarts), (*start, *happened), POLICY)


def write_of(outcome: Transition) -> Generation:
    (write,) = [a for a in outcome.actions if isinstance(a, WriteGeneration)]
    return write.generation


def stored(outcome: Transition, now_s: float) -> State:
    return step(outcome.state, ev.GenerationSeen(now_s=now_s, generation=write_of(outcome)), POLICY).state


@pytest.mark.parametrize(("restarts", "kind"), [(False, PLANNED), (True, RESTART)])
def test_the_mode_says_by_which_rules_generations_are_formed(restarts: bool, kind: GenerationKind) -> None:
    assert write_of(leads(restarts)).kind is kind
    assert write_of(leads(not restarts, ev.ModeSeen(now_s=0.0, restarts=restarts))).kind is kind


def test_numbers_go_on_when_a_job_becomes_live() -> None:
    """No number is written twice, and the store's transaction compares with the value there."""
    first = leads(True)
    assert (write_of(first).number, write_of(first).kind) == (1, RESTART)
    live = step(stored(first, 1.0), ev.ModeSeen(now_s=2.0, restarts=False), POLICY)
    assert (write_of(live).number, write_of(live).kind) == (2, PLANNED)
    (write,) = live.actions
    assert isinstance(write, WriteGeneration) and write.expected_previous_number == 1
    # in force from now on, by the rules of a live job
    assert stored(live, 3.0).view.generation == write_of(live)


def test_a_write_under_way_when_the_job_becomes_live_is_not_waited_for_in_vain() -> None:
    first = leads(True)
    becomes_live = step(first.state, ev.ModeSeen(now_s=1.0, restarts=False), POLICY)
    assert becomes_live.reason == "waiting: generation 1 is being written"
    written = step(becomes_live.state, ev.GenerationSeen(now_s=1.1, generation=write_of(first)), POLICY)
    assert (write_of(written).number, write_of(written).kind) == (2, PLANNED)
    refused = step(
        becomes_live.state, ev.GenerationWriteRefused(now_s=1.1, number=1, why="another stands"), POLICY
    )
    later = step(refused.state, ev.TimePassed(now_s=1.1 + POLICY.write_retry_s), POLICY)
    assert (write_of(later).number, write_of(later).kind) == (1, PLANNED)


def test_a_later_leader_goes_on_after_the_number_too() -> None:
    outcome = leads(False, ev.GenerationSeen(now_s=0.0, generation=record(6)))
    assert (write_of(outcome).number, write_of(outcome).kind) == (7, PLANNED)
