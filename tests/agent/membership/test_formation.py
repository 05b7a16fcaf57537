"""Each rule of formation, on a picture small enough to see the answer."""

from __future__ import annotations

from dataclasses import replace

import pytest
from pictures import (
    FAILOVER,
    LEADER,
    PLANNED,
    POLICY,
    agent,
    decided,
    departure,
    failure,
    member,
    picture,
    record,
    suspicion,
    workers,
    written,
)

from bagua_agent.membership.actions import AskWhetherAlive, ResultOutcome, WriteResult
from bagua_agent.membership.view import DeadAgent, Waiting


# -- rule 1: the first generation
def test_first_waits_for_the_minimum_and_says_what_is_missing() -> None:
    decision = decided(picture([agent("a"), agent("b", slots=2)], [member("a0")], nodes=(2, 4)))
    assert decision.action is None
    assert decision.reason == "waiting: 1 of 2 nodes (host-b has 0 of 2 workers ready)"


@pytest.mark.parametrize(
    ("most", "now_s", "expected"),
    [(2, 10.0, "a0 b0"), (4, 10.2, None), (4, 10.3, "a0 b0")],
    ids=["the most are there", "last call", "last call has passed"],
)
def test_first_forms(most: int, now_s: float, expected: str | None) -> None:
    view = picture(
        [agent("a"), agent("b")], [member("a0", ready_s=9.0), member("b0", ready_s=10.0)], nodes=(2, most)
    )
    decision = decided(view, now_s=now_s)
    if expected is None:
        assert decision.action is None and decision.wake_at_s == 10.3
    else:
        first = written(decision)
        assert (workers(first), first.number, first.base, first.kind) == (expected, 1, 0, PLANNED)


def test_an_incomplete_node_comes_in_after_its_window() -> None:
    view = picture([agent("a", slots=2)], [member("a1", ready_s=8.0)], nodes=(1, 1))
    assert decided(view, now_s=9.9).wake_at_s == 10.0
    assert workers(written(decided(view, now_s=10.0))) == "a1"


def test_first_takes_no_more_than_the_most_in_join_order() -> None:
    view = picture(
        [agent("b", joined=9), agent("a"), agent("c")], [member(w) for w in ("a0", "b0", "c0")], nodes=(1, 2)
    )
    assert workers(written(decided(view))) == "a0 c0"


# -- planned changes
def running(members: str, *more: str, number: int = 2, **options: object):  # type: ignore[no-untyped-def]
    """A job in which `number` is in force, with more ready workers."""
    names = members.split()
    agents = {n[0]: agent(n[0]) for n in (*names, *more)}
    ready = [member(n, committed=number) for n in names] + [member(n) for n in more]
    return picture(agents.values(), ready, record(number, members), **options)  # type: ignore[arg-type]


def changed(view, *agents):  # type: ignore[no-untyped-def]
    return replace(view, agents={**view.agents, **{a.agent_id: a for a in agents}})


def test_a_newcomer_is_planned_after_those_with_state() -> None:
    generation = written(decided(running("b0 c0", "a0")))
    assert (workers(generation), generation.kind, generation.base) == ("b0 c0 a0", PLANNED, 2)
    assert [(m.since_generation, m.holder) for m in generation.members] == [(1, True), (1, True), (3, False)]
    assert generation.reason == "adds host-a"


def test_a_spare_waits_for_room_and_takes_a_leavers_place() -> None:
    view = running("a0 b0", "c0", nodes=(1, 2))
    assert decided(view).reason.endswith("spare: host-c")
    assert workers(written(decided(changed(view, agent("b", leaving=True))))) == "a0 c0"


def test_scaling_down_drops_the_youngest_and_up_takes_it_back() -> None:
    view = running("a0 b0 c0", nodes=(1, 2))
    view = replace(view, generation=record(2, "a0 c0 b0:2"))
    assert workers(written(decided(view))) == "a0 c0"


def test_nothing_is_planned_before_a_commit_is_known() -> None:
    view = running("a0", "b0")
    view = replace(view, generation=record(3, "a0", kind=FAILOVER))
    assert decided(view).reason == "waiting: no worker has committed in generation 3 yet"


def test_a_pending_one_is_superseded_only_when_its_newcomer_died() -> None:
    view = running("a0 b0", "c0", "d0")
    view = replace(view, generation=record(3, "a0 b0 c0:3"), earlier=(record(2, "a0 b0"),))
    assert decided(view).action is None
    without = replace(view, members={k: v for k, v in view.members.items() if k != "c0"})
    for seen in (without, replace(without, finished=frozenset({"c0"}))):  # its node may have left at once
        generation = written(decided(seen))
        assert (workers(generation), generation.kind, generation.base) == ("a0 b0 d0", PLANNED, 2)


def pending_above_a_raised_minimum(record_: str = "a0 b0 c0:3", before: str = "a0 b0", **options: object):  # type: ignore[no-untyped-def]
    """Generation 2 is in force with `before`, `record_` is pending, and `scale` raised the minimum to 4 nodes."""
    view = running("a0 b0", "c0", nodes=(4, 8), **options)
    return replace(view, generation=record(3, record_), earlier=(record(2, before),))


def test_a_raised_minimum_stops_no_worker_when_the_newcomer_of_a_pending_one_died() -> None:
    view = pending_above_a_raised_minimum()
    view = replace(view, members={k: v for k, v in view.members.items() if k != "c0"})
    for seen in (view, replace(view, earlier=())):  # a leader that came later does not have record 2
        generation = written(decided(seen))
        assert (workers(generation), generation.kind, generation.base) == ("a0 b0", PLANNED, 2)


def test_a_leader_that_came_later_keeps_to_a_minimum_that_the_pending_one_meets() -> None:
    # a node left, and c0 and d0 were to join; how many nodes are in force is unknown
    view = replace(running("a0 b0", "c0", nodes=(3, 8)), generation=record(3, "a0 b0 c0:3"))
    view = replace(view, members={k: v for k, v in view.members.items() if k != "c0"})
    assert workers(written(decided(view))) == ""


def test_a_raised_minimum_stops_no_worker_when_a_pending_one_breaks() -> None:
    alive = replace(LEADER, alive_agents={"b": 5.0, "c": 5.0})
    view = pending_above_a_raised_minimum(suspicions=[suspicion("a0", 3)])
    generation = written(decided(view, evidence=alive))
    assert (workers(generation), generation.kind, generation.base) == ("a0 b0", FAILOVER, 2)
    # the pending one, which a leave made smaller, may be in force too
    smaller = pending_above_a_raised_minimum("a0 b0", "a0 b0 d0", suspicions=[suspicion("a0", 3)])
    assert workers(written(decided(smaller, evidence=alive))) == "a0 b0"


def test_a_loss_below_the_generation_in_force_waits_though_another_is_pending() -> None:
    view = pending_above_a_raised_minimum()
    view = replace(view, members={k: v for k, v in view.members.items() if k not in ("b0", "c0")})
    assert decided(view).waiting is Waiting.MINIMUM


def test_a_raised_minimum_holds_up_no_new_begin_of_as_many_nodes() -> None:
    view = running("a0 b0", nodes=(4, 8), failures=[failure("a0", step=4), failure("b0", step=5)])
    respawned = {w: member(w) for w in ("a0x", "b0x")}
    view = replace(view, members={**view.members, **respawned}, has_checkpoints=True)
    generation = written(decided(view, policy=replace(POLICY, max_restarts=2)))
    assert (workers(generation), generation.base) == ("a0x b0x", 0)


def test_a_worker_that_the_pending_one_left_out_counts_as_new() -> None:
    view = running("a0 b0", "c0")
    view = replace(view, generation=record(3, "a0 c0:3"), earlier=(record(2, "a0 b0"),))
    view = replace(view, members={k: v for k, v in view.members.items() if k != "c0"})
    back = written(decided(view)).placement_of("b0")
    assert back is not None and back.since_generation == 4 and not back.holder


# -- leaving
def test_the_last_holder_stays_until_another_has_the_state() -> None:
    view = changed(running("a0", "b0", nodes=(1, 1)), agent("a", leaving=True))
    both = written(decided(view))
    assert workers(both) == "a0 b0"
    view = replace(view, generation=both, committed_generation=3)
    assert "host-a leaves once another node has the state" in decided(view).reason
    view = replace(view, members={**view.members, "b0": member("b0", committed=3)})
    assert workers(written(decided(view))) == "b0"


def test_a_leave_below_the_minimum_empties_and_comes_back_as_a_loss() -> None:
    view = changed(running("a0 b0", nodes=(2, 4)), agent("a", leaving=True))
    empty = written(decided(view))
    assert (workers(empty), empty.kind, empty.base) == ("", PLANNED, 2)
    view = replace(view, generation=empty, earlier=(record(2, "a0 b0"),))
    assert decided(view).waiting is Waiting.MINIMUM
    view = picture([agent("b"), agent("c")], [member("b0", committed=2), member("c0")], empty, nodes=(2, 4))
    for seen in (view, replace(view, earlier=(record(2, "a0 b0"),))):  # a new leader knows only the store
        again = written(decided(seen))
        assert (workers(again), again.kind, again.base) == ("b0 c0", FAILOVER, 2)
        assert again.members[0].holder and again.members[0].since_generation <= 2


def test_the_last_nodes_leave_and_the_job_stops() -> None:
    view = changed(running("a0"), agent("a", leaving=True))
    empty = written(decided(view))
    assert not empty.members
    gone = replace(view, generation=empty, members={}, departures={"a0": departure("a0", 2)})
    action = decided(gone).action
    assert isinstance(action, WriteResult) and action.outcome is ResultOutcome.STOPPED
    assert decided(gone, policy=replace(POLICY, ends_when_all_leave=False)).action is None, "a scheduler says"


# -- losses
def test_a_loss_is_taken_at_once_without_newcomers() -> None:
    view = running("a0 b0", "c0")
    del view.members["b0"]  # type: ignore[attr-defined]
    generation = written(decided(view))
    assert (workers(generation), generation.kind, generation.base) == ("a0", FAILOVER, 2)


def test_newcomers_come_in_with_a_loss_only_below_the_minimum() -> None:
    view = running("a0 b0", "c0", nodes=(2, 4))
    del view.members["b0"]  # type: ignore[attr-defined]
    assert workers(written(decided(view))) == "a0 c0"


def test_below_the_minimum_survivors_hold() -> None:
    view = running("a0 b0", nodes=(2, 4))
    del view.members["b0"]  # type: ignore[attr-defined]
    decision = decided(view)
    assert decision.waiting is Waiting.MINIMUM
    assert (
        decision.reason
        == "waiting: 1 of 2 nodes (host-b has 0 of 1 workers ready); lost global rank 1 on host-b"
    )
    policy = replace(POLICY, below_minimum_timeout_s=5.0)
    waited = replace(LEADER, waiting=Waiting.MINIMUM, waiting_since_s=5.0)
    assert isinstance(decided(view, evidence=waited, policy=policy).action, WriteResult)


def test_below_the_minimum_a_leaver_is_let_go() -> None:
    view = changed(running("a0 b0 c0", nodes=(3, 4)), agent("a", leaving=True))
    del view.members["b0"]  # type: ignore[attr-defined]
    empty = written(decided(view))
    assert (workers(empty), empty.kind, empty.base) == ("", FAILOVER, 2)


def test_a_loss_while_pending_keeps_those_of_both() -> None:
    view = replace(running("a0 b0", "c0"), generation=record(3, "a0 b0 c0:3"), earlier=(record(2, "a0 b0"),))
    del view.members["b0"]  # type: ignore[attr-defined]
    generation = written(decided(view))
    assert (workers(generation), generation.kind, generation.base) == ("a0", FAILOVER, 2)


def test_no_generation_without_a_holder() -> None:
    view = replace(running("a0", "b0"), generation=record(2, "a0 b0:2"))
    del view.members["a0"]  # type: ignore[attr-defined]
    decision = decided(view)
    assert decision.waiting is Waiting.HOLDER and decision.wake_at_s == 70.0
    waited = replace(LEADER, waiting=Waiting.HOLDER, waiting_since_s=0.0)
    action = decided(view, evidence=waited, now_s=60.0).action
    assert isinstance(action, WriteResult) and action.outcome is ResultOutcome.FAILED
    committed = replace(view, members={"b0": member("b0", committed=2)})
    assert workers(written(decided(committed))) == "b0"


def test_a_worker_that_the_pending_record_leaves_out_is_no_holder_even_if_no_other_is_left() -> None:
    view = replace(
        running("a0 b0", "c0", suspicions=[suspicion("a0", 2)]),
        generation=record(3, "b0 c0:3"),
        earlier=(record(2, "a0 b0"),),
    )
    del view.members["b0"]  # type: ignore[attr-defined]
    # b0 may have switched alone, and committed and written steps that a0 would do again
    stalled = replace(view, suspicions={"a0": suspicion("a0", 2, broken=False)})
    for seen in (view, stalled, replace(view, suspicions={})):
        assert decided(seen).waiting is Waiting.HOLDER


def test_an_empty_one_while_pending_points_to_the_pending_record() -> None:
    view = changed(running("a0 b0 c0", "d0", nodes=(3, 4)), agent("a", leaving=True))
    view = replace(view, generation=record(3, "a0 b0 d0:3"), earlier=(record(2, "a0 b0 c0"),))
    view = replace(view, members={k: v for k, v in view.members.items() if k not in ("b0", "d0")})
    empty = written(decided(view))
    # c0, which it left out, may have stepped aside: only who is in both can be taken for a holder
    assert (workers(empty), empty.kind, empty.base) == ("", FAILOVER, 3)


def test_a_first_step_that_failed_everywhere_starts_anew() -> None:
    view = picture(
        [agent("a")],
        [member("a0x")],
        record(1, "a0", base=0),
        nodes=(1, 1),
        failures=[failure("a0", step=0)],
    )
    generation = written(decided(view, policy=replace(POLICY, max_restarts=1)))
    assert (workers(generation), generation.number, generation.base) == ("a0x", 2, 0)


# -- suspicions: rules 3 and 4
def test_a_suspicion_is_looked_into_before_anything_is_decided() -> None:
    view = running("a0 b0 c0", "d0", suspicions=[suspicion("a0", 2)])
    assert decided(view).action == AskWhetherAlive(("b", "c"))
    dead = replace(LEADER, dead_agents={"b": DeadAgent("b", 2, 6.0, "refused")})
    assert workers(written(decided(view, evidence=dead))) == "a0 c0"
    # put again since then: the death was about the key before
    assert decided(changed(view, agent("b", joined=50)), evidence=dead).action == AskWhetherAlive(("b", "c"))


def test_broken_without_a_loss_is_made_anew_with_the_same() -> None:
    view = running("a0 b0", "c0", suspicions=[suspicion("a0", 2)])
    alive = replace(LEADER, alive_agents={"b": 5.0})
    generation = written(decided(view, evidence=alive))
    assert (workers(generation), generation.kind) == ("a0 b0", FAILOVER)
    assert decided(view, evidence=replace(LEADER, alive_agents={"b": 4.9})).action == AskWhetherAlive(("b",))


def test_a_stall_of_the_living_changes_nothing() -> None:
    view = running("a0 b0", suspicions=[suspicion("a0", 2, broken=False)])
    assert decided(view, evidence=replace(LEADER, alive_agents={"b": 5.0})).reason.startswith(
        "generation 2 has"
    )


def test_suspicions_of_older_generations_are_stale() -> None:
    assert decided(running("a0 b0", suspicions=[suspicion("a0", 1)])).reason.startswith("generation 2 has")


def test_after_an_election_a_missing_key_is_given_time_unless_it_is_suspected() -> None:
    view = running("a0 b0", "c0")
    del view.members["b0"]  # type: ignore[attr-defined]
    elected = replace(LEADER, elected_at_s=9.0)
    decision = decided(view, evidence=elected)
    assert decision.action is None and decision.wake_at_s == 9.0 + POLICY.lease_ttl_s
    assert workers(written(decided(view, evidence=elected, now_s=12.0))) == "a0"
    suspected = replace(view, suspicions={"a0": suspicion("a0", 2)})
    assert workers(written(decided(suspected, evidence=elected))) == "a0"


def test_a_lost_record_is_formed_again_by_those_who_were_furthest() -> None:
    view = picture([agent("a"), agent("b")], [member("a0", committed=4), member("b0")], None)
    generation = written(decided(view))
    assert (workers(generation), generation.number, generation.base, generation.kind) == (
        "a0",
        5,
        4,
        FAILOVER,
    )


@pytest.mark.parametrize(("generation", "asks_everybody"), [(3, True), (4, False)])
def test_a_stall_behind_a_newer_planned_record_is_a_break(generation: int, asks_everybody: bool) -> None:
    # 3 was superseded by 4 for a newcomer that died, but its members may have switched to it by then
    view = replace(
        running("a0 b0", suspicions=[suspicion("b0", generation, broken=False)]),
        generation=record(4, "a0 b0", base=2),
        earlier=(record(3, "a0 b0 c0:3", base=2), record(2, "a0 b0")),
    )
    alive = replace(LEADER, alive_agents={"a": 9.9, "b": 9.9})
    decision = decided(view, evidence=alive)
    if asks_everybody:
        assert workers(written(decision)) == "a0 b0" and written(decision).kind is FAILOVER
    else:
        assert decision.action is None
