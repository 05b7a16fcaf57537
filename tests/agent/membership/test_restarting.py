"""Restart mode's rules, one picture at a time."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bagua_agent.membership.actions import (
    AskWhetherAlive,
    Decision,
    ResultOutcome,
    WriteGeneration,
    WriteResult,
)
from bagua_agent.membership.policy import Policy
from bagua_agent.membership.state_machine.restarting import decide_restart, worker_id_of
from bagua_agent.membership.view import (
    AgentView,
    DeadAgent,
    Desired,
    Evidence,
    FailureView,
    JobView,
    Probe,
    Run,
)
from bagua_contract.records import Generation, GenerationKind

POLICY = Policy(last_call_s=0.3, max_restarts=1, blame_window_s=0.5, probe_window_s=0.5, lease_ttl_s=2.0)
NOW_S = 100.0
LEADER = Evidence(observer_agent_id="a1")


def node(name: str, revision: int, **changes: object) -> AgentView:
    agent = AgentView(
        agent_id=name,
        node_name=f"host-{name}",
        slots=2,
        topology="",
        leaving=False,
        control_address=f"{name}:1",
        join_revision=revision,
        ready=True,
        ready_since_s=50.0,
    )
    return replace(agent, **changes)  # type: ignore[arg-type]


def picture(*agents: AgentView, least: int = 1, most: int = 4, **changes: object) -> JobView:
    view = JobView(agents={a.agent_id: a for a in agents}, desired=Desired(least, most))
    return replace(view, **changes)  # type: ignore[arg-type]


def decide(view: JobView, evidence: Evidence = LEADER, now_s: float = NOW_S) -> Decision:
    return decide_restart(view, evidence, now_s, POLICY)


def written(decision: Decision) -> Generation:
    assert isinstance(decision.action, WriteGeneration), decision
    return decision.action.generation


def ended(decision: Decision) -> WriteResult:
    assert isinstance(decision.action, WriteResult), decision
    return decision.action


def first_of(view: JobView) -> Generation:
    return written(decide(view))


def running(view: JobView, *states: Run, since_s: float = 60.0) -> JobView:
    """The picture in which a first generation of all agents is written and each agent says what it runs."""
    record = first_of(view)
    agents = {
        a.agent_id: replace(a, run_generation=record.number, run=state, run_since_s=since_s)
        for a, state in zip(view.agents.values(), states, strict=True)
    }
    return replace(view, generation=record, agents=agents)


def failure(record: Generation, agent: str, slot: int, order: int, **changes: object) -> FailureView:
    view = FailureView(
        worker_id=worker_id_of(agent, slot, record.number),
        node_name=f"host-{agent}",
        step=0,
        in_step=False,
        script_failure=True,
        summary="ValueError: no such thing",
        order=order,
        generation=record.number,
    )
    return replace(view, **changes)  # type: ignore[arg-type]


def failures(*some: FailureView) -> dict[str, FailureView]:
    return {f.worker_id: f for f in some}


def test_a_first_generation_waits_for_the_last_call_unless_the_most_are_there() -> None:
    two = picture(node("a1", 1), node("a2", 2, ready_since_s=NOW_S))
    waits = decide(two)
    assert waits.action is None
    assert waits.wake_at_s == NOW_S + POLICY.last_call_s
    record = written(decide(two, now_s=NOW_S + POLICY.last_call_s))
    assert record.kind is GenerationKind.RESTART
    assert [(m.agent_id, m.slot, m.global_rank, m.node_rank, m.local_rank) for m in record.members] == [
        ("a1", 0, 0, 0, 0),
        ("a1", 1, 1, 0, 1),
        ("a2", 0, 2, 1, 0),
        ("a2", 1, 3, 1, 1),
    ]
    assert written(decide(replace(two, desired=Desired(1, 2)))).node_count == 2


def test_too_few_or_unready_nodes_wait() -> None:
    assert decide(picture(node("a1", 1), least=2)).action is None
    assert decide(picture(node("a1", 1), node("a2", 2, ready=False), least=2)).action is None


def test_a_newcomer_is_let_in_after_the_last_call_when_it_is_ready() -> None:
    view = running(picture(node("a1", 1)), Run.RUNNING)
    unready = replace(view, agents={**view.agents, "a2": node("a2", 5, ready=False)})
    assert decide(unready).action is None
    ready = replace(view, agents={**view.agents, "a2": node("a2", 5, ready_since_s=NOW_S)})
    assert decide(ready).action is None
    record = written(decide(ready, now_s=NOW_S + POLICY.last_call_s))
    assert record.number == 2
    assert [m.agent_id for m in record.members] == ["a1", "a1", "a2", "a2"]


def test_nodes_beyond_the_most_are_spares_and_take_over_at_once() -> None:
    view = running(picture(node("a1", 1), node("a2", 2), most=2), Run.RUNNING, Run.RUNNING)
    with_spare = replace(view, agents={**view.agents, "a3": node("a3", 3)})
    assert decide(with_spare).action is None
    lost = {k: a for k, a in with_spare.agents.items() if k != "a1"}
    record = written(decide(replace(with_spare, agents=lost)))
    # who stays keeps its place before the spare
    assert [m.agent_id for m in record.members] == ["a2", "a2", "a3", "a3"]
    assert "lost host-a1" in record.reason


def test_after_an_election_missing_agents_may_come_back() -> None:
    view = running(picture(node("a1", 1), node("a2", 2)), Run.RUNNING, Run.RUNNING)
    alone = replace(view, agents={"a1": view.agents["a1"]})
    fresh = replace(LEADER, elected_at_s=NOW_S - 0.5)
    assert decide(alone, fresh).action is None
    assert decide(alone, fresh).wake_at_s == NOW_S + 1.5
    assert written(decide(alone, LEADER)).number == 2


def test_after_an_election_a_missing_agent_is_asked_at_its_last_address() -> None:
    view = running(picture(node("a1", 1), node("a2", 2), node("a3", 3)), *[Run.RUNNING] * 3)
    lost = view.agents["a2"]
    others = replace(view, agents={a: view.agents[a] for a in ("a1", "a3")}, gone={"a2": lost})
    fresh = replace(LEADER, elected_at_s=NOW_S)
    asks = decide(others, fresh)
    assert asks.action == AskWhetherAlive(("a2",))
    waiting = replace(fresh, probes={"a2": Probe("a2", lost.join_revision, 1, NOW_S, "a3")})
    assert decide(others, waiting).action is None
    assert decide(others, waiting).wake_at_s == NOW_S + 2 * POLICY.probe_window_s
    dead = replace(fresh, dead_agents={"a2": DeadAgent("a2", lost.join_revision, NOW_S, "refused")})
    assert "lost host-a2" in written(decide(others, dead)).reason, "no lease is waited for"
    alive = replace(fresh, alive_agents={"a2": NOW_S})
    assert decide(others, alive).action is None
    assert decide(others, alive).wake_at_s == NOW_S + POLICY.election_grace_s, "its key may only be late"
    assert written(decide(others, alive, NOW_S + POLICY.election_grace_s)).number == 2
    assert written(decide(others, replace(LEADER, elected_at_s=NOW_S - 50))).number == 2, "no election"


def test_below_the_minimum_all_workers_stop_until_there_are_enough() -> None:
    view = running(picture(node("a1", 1), node("a2", 2), least=2), Run.RUNNING, Run.RUNNING)
    alone = replace(view, agents={"a1": view.agents["a1"]})
    empty = written(decide(alone))
    assert (empty.number, empty.members) == (2, ())
    waiting = replace(alone, generation=empty)
    assert decide(waiting).action is None
    back = replace(waiting, agents={**waiting.agents, "a9": node("a9", 9)})
    assert written(decide(back)).number == 3


def test_a_failure_first_asks_whether_the_others_live() -> None:
    view = running(picture(node("a1", 1), node("a2", 2), node("a3", 3)), Run.FAILED, Run.RUNNING, Run.RUNNING)
    assert view.generation is not None
    view = replace(view, failures=failures(failure(view.generation, "a1", 0, 7)))
    asks = decide(view)
    assert asks.action == AskWhetherAlive(("a2", "a3"))
    dead = DeadAgent("a2", 2, 61.0, "refused the connection")
    knows = replace(LEADER, dead_agents={"a2": dead}, alive_agents={"a3": 60.5})
    record = written(decide(view, knows))
    assert record.script_failures == 0  # the host's loss, not the script's fault
    assert {m.agent_id for m in record.members} == {"a1", "a3"}


def test_an_agent_in_doubt_is_asked_until_it_has_answered_since() -> None:
    view = running(picture(node("a1", 1), node("a2", 2), node("a3", 3)), *[Run.RUNNING] * 3)
    doubts = replace(LEADER, doubted_agents={"a2": 90.0})
    asks = decide(view, doubts)
    assert asks.action == AskWhetherAlive(("a2",)) and asks.reason == "generation 1 has 6 workers"
    asked = replace(doubts, probes={"a2": Probe("a2", 2, 1, NOW_S, "a3")})
    assert (decide(view, asked).action, decide(view, asked).wake_at_s) == (None, NOW_S + 1.0)
    assert decide(view, replace(doubts, alive_agents={"a2": 89.0})).action is not None, "an older answer"
    assert decide(view, replace(doubts, alive_agents={"a2": 90.0})).action is None
    dead = replace(doubts, dead_agents={"a2": DeadAgent("a2", 2, 91.0, "refused the connection")})
    record = written(decide(view, dead))
    assert record.reason == "lost host-a2" and {m.agent_id for m in record.members} == {"a1", "a3"}


def test_a_doubt_holds_up_nothing_and_one_about_no_member_is_nothing() -> None:
    view = running(picture(node("a1", 1), node("a2", 2)), Run.RUNNING, Run.RUNNING)
    doubts = replace(LEADER, doubted_agents={"a2": 90.0, "a3": 90.0, "elsewhere": 90.0})
    joined = replace(view, agents={**view.agents, "a3": node("a3", 3)})
    assert {m.agent_id for m in written(decide(joined, doubts)).members} == {"a1", "a2", "a3"}
    waits = replace(view, agents={**view.agents, "a3": node("a3", 3, ready_since_s=NOW_S)})
    asks = decide(waits, doubts)
    assert asks.action == AskWhetherAlive(("a2",)), "the newcomer is in no generation yet"
    assert asks.wake_at_s == NOW_S + POLICY.last_call_s, "the last call ends when it would have"


def test_a_script_failure_draws_on_the_budget_and_then_ends_the_job() -> None:
    view = running(picture(node("a1", 1), node("a2", 2)), Run.FAILED, Run.FAILED)
    assert view.generation is not None
    view = replace(view, failures=failures(failure(view.generation, "a2", 1, 7)))
    record = written(decide(view))
    assert (record.number, record.script_failures) == (2, 1)
    again = {k: replace(a, run_generation=2) for k, a in view.agents.items()}
    bad = failure(record, "a1", 0, 9, summary="KeyError: 'x'")
    second = replace(view, generation=record, agents=again, failures=failures(bad))
    result = ended(decide(second))
    assert result.outcome is ResultOutcome.FAILED
    assert result.failure == bad
    assert "KeyError" in result.reason


def test_a_killed_worker_does_not_draw_on_the_budget_though_its_peers_fail_with_errors() -> None:
    view = running(picture(node("a1", 1), node("a2", 2)), Run.FAILED, Run.FAILED)
    assert view.generation is not None
    killed = failure(
        view.generation, "a2", 1, 8, summary="killed by SIGKILL", script_failure=False, exit_code=-9
    )
    casualty = failure(
        view.generation, "a1", 0, 7, summary="RuntimeError: [gloo] Connection closed by peer [10.0.0.2]:4242"
    )
    record = written(decide(replace(view, failures=failures(casualty, killed))))
    assert record.script_failures == 0
    assert "SIGKILL" in record.reason


def test_a_failure_waits_for_the_blame_window_while_others_run() -> None:
    view = running(picture(node("a1", 1), node("a2", 2)), Run.FAILED, Run.RUNNING, since_s=NOW_S - 0.1)
    assert view.generation is not None
    view = replace(view, failures=failures(failure(view.generation, "a1", 0, 7)))
    knows = replace(LEADER, alive_agents={"a2": NOW_S})
    waits = decide(view, knows)
    assert waits.action is None
    assert waits.wake_at_s == NOW_S + 0.4
    assert written(decide(view, knows, NOW_S + 0.4)).script_failures == 1


def test_a_raised_minimum_parks_no_job_that_lost_no_node() -> None:
    view = running(picture(node("a1", 1), node("a2", 2)), Run.FAILED, Run.FAILED)
    assert view.generation is not None
    view = replace(view, failures=failures(failure(view.generation, "a2", 1, 7)), desired=Desired(4, 4))
    assert ranks_of(written(decide(view))) == ["a1", "a2"]
    lost = replace(view, agents={"a1": view.agents["a1"]}, gone={"a2": view.agents["a2"]})
    empty = written(decide(lost))
    assert empty.members == () and empty.reason == "lost host-a2; 1 of 4 nodes remain"


def test_a_leaving_node_is_left_out_and_the_last_one_stops_the_job() -> None:
    view = running(picture(node("a1", 1), node("a2", 2)), Run.RUNNING, Run.RUNNING)
    leaving = replace(view, agents={**view.agents, "a1": replace(view.agents["a1"], leaving=True)})
    record = written(decide(leaving))
    assert {m.agent_id for m in record.members} == {"a2"}
    alone = running(picture(node("a1", 1)), Run.RUNNING)
    goes = replace(alone, agents={"a1": replace(alone.agents["a1"], leaving=True)})
    empty = written(decide(goes))
    assert empty.members == ()
    left = replace(goes, generation=empty)
    assert ended(decide(left)).outcome is ResultOutcome.STOPPED
    scheduled = replace(POLICY, ends_when_all_leave=False)
    assert decide_restart(left, LEADER, NOW_S, scheduled).action is None


def test_a_leader_whose_own_key_is_not_there_stops_no_job() -> None:
    """Its lease ended, as that of an agent that was frozen."""
    leaves = node("a2", 2, leaving=True)
    assert not isinstance(decide(picture(leaves)).action, WriteResult)
    both = picture(node("a1", 1, leaving=True), leaves)
    assert ended(decide(both)).outcome is ResultOutcome.STOPPED


def test_no_node_is_let_in_once_workers_end_and_all_ended_is_success() -> None:
    view = running(picture(node("a1", 1), node("a2", 2)), Run.ENDING, Run.RUNNING)
    more = replace(view, agents={**view.agents, "a3": node("a3", 3)})
    assert decide(more).action is None
    done = running(picture(node("a1", 1), node("a2", 2)), Run.FINISHED, Run.FINISHED)
    assert ended(decide(done)).outcome is ResultOutcome.SUCCEEDED


def ways_to_go(view: JobView, agent_id: str) -> dict[str, tuple[JobView, Evidence]]:
    """Pictures in which that agent leaves, has gone, or is known to be dead."""
    last = view.agents[agent_id]
    others = {a: v for a, v in view.agents.items() if a != agent_id}
    return {
        "leaves": (
            replace(view, agents={**view.agents, agent_id: replace(last, leaving=True)}),
            LEADER,
        ),
        "gone": (replace(view, agents=others, gone={agent_id: last}), LEADER),
        "gone before this leader saw it": (
            replace(view, agents=others, finished_restarted=frozenset({"a2.0.g1", "a2.1.g1"})),
            LEADER,
        ),
        "just elected": (
            replace(view, agents=others, gone={agent_id: last}),
            replace(LEADER, elected_at_s=NOW_S),
        ),
        "dead": (
            view,
            replace(LEADER, dead_agents={agent_id: DeadAgent(agent_id, last.join_revision, 91.0, "refused")}),
        ),
    }


WAYS = ("leaves", "gone", "gone before this leader saw it", "just elected", "dead")


@pytest.mark.parametrize("least", [1, 2])
@pytest.mark.parametrize("way", WAYS)
def test_a_node_that_has_finished_is_needed_no_more(way: str, least: int) -> None:
    """Rank 0 saves the model while the other node, whose workers have ended with 0, is preempted."""
    for state in (Run.RUNNING, Run.ENDING):
        view = running(picture(node("a1", 1), node("a2", 2), least=least), state, Run.FINISHED)
        without, evidence = ways_to_go(view, "a2")[way]
        assert decide(without, evidence).action is None
        more = replace(without, agents={**without.agents, "a3": node("a3", 3)})
        assert decide(more, evidence).action is None, "no node joins any more"
    done = running(picture(node("a1", 1), node("a2", 2), least=least), Run.FINISHED, Run.FINISHED)
    without, evidence = ways_to_go(done, "a2")[way]
    assert ended(decide(without, evidence)).outcome is ResultOutcome.SUCCEEDED


def test_a_node_has_finished_only_if_all_its_workers_have_in_this_generation() -> None:
    view = running(picture(node("a1", 1), node("a2", 2)), Run.FINISHED, Run.ENDING)
    alone = replace(view, agents={"a1": view.agents["a1"]}, gone={"a2": view.agents["a2"]})
    half = replace(alone, finished_restarted=frozenset({"a2.0.g1"}))
    assert written(decide(half)).reason == "lost host-a2"
    before = replace(alone, finished_restarted=frozenset({"a2.0.g0", "a2.1.g0"}))
    assert written(decide(before)).reason == "lost host-a2"
    earlier = replace(view.agents["a2"], run=Run.FINISHED, run_generation=0)
    assert written(decide(replace(alone, gone={"a2": earlier}))).reason == "lost host-a2"


@pytest.mark.parametrize("way", ["gone", "gone before this leader saw it", "dead"])
def test_a_failure_after_a_finished_node_was_lost_is_explained_by_the_loss(way: str) -> None:
    """That node may have held the store at which the workers meet."""
    view = running(picture(node("a1", 1), node("a2", 2)), Run.FAILED, Run.FINISHED)
    assert view.generation is not None
    view = replace(view, failures=failures(failure(view.generation, "a1", 0, 7)))
    record = written(decide(*ways_to_go(view, "a2")[way]))
    assert (record.reason, record.script_failures) == ("lost host-a2", 0)


def test_scaling_down_drops_the_youngest() -> None:
    view = running(picture(node("a1", 1), node("a2", 2), node("a3", 3)), *[Run.RUNNING] * 3)
    fewer = replace(view, desired=Desired(1, 2))
    record = written(decide(fewer))
    assert [m.agent_id for m in record.members] == ["a1", "a1", "a2", "a2"]
    assert "drops host-a3" in record.reason


def test_the_first_to_fail_on_one_node_may_only_have_noticed_first() -> None:
    view = running(picture(node("a1", 1), most=1), Run.FAILED, since_s=99.9)
    record = view.generation
    assert record is not None
    noticed = failure(record, "a1", 0, 1, summary="DistBackendError: a peer closed the connection")
    view = replace(view, failures=failures(noticed))
    waits = decide(view)
    assert waits.action is None and waits.wake_at_s == 99.9 + POLICY.blame_window_s
    both = replace(view, failures=failures(noticed, failure(record, "a1", 1, 2, summary="ValueError: bad")))
    assert "a worker failed: slot 0 on host-a1 (ValueError: bad)" in written(decide(both)).reason
    assert "DistBackendError" in written(decide(view, now_s=101.0)).reason, "but not for ever"


def ranks_of(record: Generation) -> list[str]:
    return [m.agent_id for m in record.members if m.local_rank == 0]


def test_a_node_keeps_its_place_among_nodes_that_come_before_or_after_it() -> None:
    """Rank 0 stays where the script keeps its files; who comes in later comes in behind."""
    view = running(picture(node("a5", 5)), Run.RUNNING)
    # it put its key before, but only now workers can be started there
    older = replace(view, agents={**view.agents, "a2": node("a2", 2)})
    second = written(decide(older))
    assert ranks_of(second) == ["a5", "a2"]
    assert {m.agent_id: m.since_generation for m in second.members} == {"a5": 1, "a2": 2}

    eldest = replace(older, generation=second, agents={**older.agents, "a1": node("a1", 1)})
    third = written(decide(eldest))
    assert ranks_of(third) == ["a5", "a2", "a1"]
    assert {m.agent_id: m.since_generation for m in third.members} == {"a5": 1, "a2": 2, "a1": 3}


def test_a_node_that_puts_its_key_anew_keeps_its_place() -> None:
    """After etcd lost its lease a node's key is younger than all others; the node itself is not."""
    view = running(picture(node("a1", 1), node("a2", 2)), Run.RUNNING, Run.RUNNING)
    again = replace(view, agents={"a1": replace(view.agents["a1"], join_revision=9), "a2": view.agents["a2"]})
    grows = replace(again, agents={**again.agents, "a3": node("a3", 3)})
    assert ranks_of(written(decide(grows))) == ["a1", "a2", "a3"]


def test_a_node_that_was_left_out_loses_its_place() -> None:
    view = running(picture(node("a1", 1), node("a2", 2)), Run.RUNNING, Run.RUNNING)
    alone = replace(view, agents={"a2": view.agents["a2"]})
    second = written(decide(alone))
    back = replace(alone, generation=second, agents={**alone.agents, "a1": node("a1", 1)})
    assert ranks_of(written(decide(back))) == ["a2", "a1"]


def test_those_who_wait_below_the_minimum_keep_their_places() -> None:
    view = running(picture(node("a5", 5), node("a6", 6), least=2), Run.RUNNING, Run.RUNNING)
    first = view.generation
    assert first is not None
    alone = replace(view, agents={"a5": view.agents["a5"]})
    empty = written(decide(alone))
    # one that came before both, but could not start workers until now
    back = replace(alone, generation=empty, earlier=(first,), agents={**alone.agents, "a1": node("a1", 1)})
    assert ranks_of(written(decide(back))) == ["a5", "a1"]
    full = replace(back, desired=Desired(1, 1))
    assert ranks_of(written(decide(full))) == ["a5"], "who was in goes on before anybody else"


def test_scaling_down_never_drops_the_node_of_rank_0() -> None:
    view = running(picture(node("a5", 5)), Run.RUNNING)
    grows = replace(view, agents={**view.agents, "a1": node("a1", 1)})
    second = written(decide(grows))
    assert ranks_of(second) == ["a5", "a1"]
    fewer = replace(grows, generation=second, desired=Desired(1, 1))
    assert ranks_of(written(decide(fewer))) == ["a5"]
