"""Decisions while the job's first workers are before their loops."""

from __future__ import annotations

from dataclasses import replace

import pytest
from pictures import (
    LEADER,
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

from bagua_agent.membership.formation.departure import parting
from bagua_agent.membership.hang import HangOutcome
from bagua_agent.membership.view import Evidence, MemberView, Quarantine
from bagua_agent.node.live_workers import must_start_again
from bagua_contract.records import Generation, GenerationKind, Stage

GATHERING = GenerationKind.GATHERING
WAITING, PREPARING, LOOP = Stage.WAITING, Stage.PREPARING, Stage.LOOP


def at(stage: Stage, *names: str) -> list[MemberView]:
    return [replace(member(name), stage=stage) for name in names]


def gathering(members: str, number: int = 1, **more: object) -> Generation:
    made = record(number, members, kind=GATHERING, base=0)
    return replace(made, fingerprint={}, **more)  # type: ignore[arg-type]


def test_a_partial_node_is_waited_for_beyond_the_short_window() -> None:
    view = picture([agent("a", slots=2), agent("b")], at(WAITING, "a0", "b0"))
    decision = decided(view, now_s=POLICY.node_window_s + 60.0)
    assert decision.action is None
    assert "host-a" in decision.reason
    view = picture([agent("a", slots=2), agent("b")], at(WAITING, "a0", "a1", "b0"))
    assert workers(written(decided(view))) == "a0 a1 b0"


def test_a_node_that_is_there_without_any_worker_yet_is_waited_for() -> None:
    view = picture([agent("a"), agent("b")], at(WAITING, "a0"))
    assert decided(view, now_s=60.0).action is None
    view = picture([agent("a"), agent("b", leaving=True)], at(WAITING, "a0"))
    assert workers(written(decided(view, now_s=60.0))) == "a0"


def test_a_node_in_quarantine_is_not_waited_for() -> None:
    held = Evidence("a", quarantines={"b": Quarantine(100.0, 1, "it can't be reached")})
    view = picture([agent("a"), agent("b")], at(WAITING, "a0", "b0"))
    assert workers(written(decided(view, evidence=held))) == "a0"
    view = picture([agent("a"), agent("b")], at(WAITING, "a0", "b0"), nodes=(2, 2))
    assert workers(written(decided(view, evidence=held))) == "a0 b0"  # the minimum needs it


def test_one_worker_that_asks_makes_it_a_gathering_of_all() -> None:
    view = picture([agent("a"), agent("b")], [*at(LOOP, "a0"), *at(WAITING, "b0")])
    assert written(decided(view)).kind is GATHERING
    view = picture([agent("a"), agent("b")], at(LOOP, "a0", "b0"))
    assert written(decided(view)).kind is GenerationKind.PLANNED


def test_ranks_stay_though_a_key_was_put_again() -> None:
    """etcd was away meanwhile, and a0's key is younger than b0's now."""
    again = replace(member("a0"), join_revision=9000)
    view = picture([agent("a"), agent("b")], [again, member("b0")], gathering("a0 b0"))
    first = written(decided(view))
    assert (workers(first), first.number, first.base) == ("a0 b0", 2, 0)
    assert [m.since_generation for m in first.members] == [2, 2]


def test_the_first_generation_has_the_fingerprint_of_its_workers() -> None:
    view = picture([agent("a"), agent("b")], at(LOOP, "a0", "b0"), gathering("a0 b0"))
    assert written(decided(view)).fingerprint == {"model": "m"}


@pytest.mark.parametrize("again", [True, False])
def test_a_lost_one_starts_all_again_and_what_it_is_for_is_kept(again: bool) -> None:
    view = picture(
        [agent("a"), agent("b")], at(PREPARING, "a0"), gathering("a0 b0", again=again), nodes=(2, 2)
    )
    view = replace(view, failures={"b0": failure("b0", script=False)})
    empty = written(decided(view))
    assert (empty.kind, empty.members, empty.again) == (GATHERING, (), again)
    successors = picture([agent("a"), agent("b")], at(WAITING, "a0x", "b0x"), empty, nodes=(2, 2))
    second = written(decided(successors))
    assert (second.kind, second.number, second.again) == (GATHERING, 3, again)
    at_loop = picture([agent("a"), agent("b")], at(LOOP, "a0x", "b0x"), second, nodes=(2, 2))
    assert written(decided(at_loop)).kind is (GenerationKind.FAILOVER if again else GenerationKind.PLANNED)


def test_workers_that_are_ahead_are_not_gathered() -> None:
    """The empty record stands, and b's agent has not ended its old worker yet."""
    empty = replace(gathering("a0", 2), members=())
    view = picture([agent("a"), agent("b")], [*at(WAITING, "a0x"), *at(PREPARING, "b0")], empty, nodes=(2, 2))
    assert decided(view, now_s=60.0).action is None


def test_no_worker_is_replaced_before_the_loop() -> None:
    """a0 downloads for an hour; b0 waits for it."""
    stall = replace(suspicion("b0", 1, broken=False, seen_s=0.0), waited_s=3600.0, waiting_since_s=-3600.0)
    view = picture(
        [agent("a"), agent("b")], at(PREPARING, "a0", "b0"), gathering("a0 b0"), suspicions=[stall]
    )
    alive = replace(LEADER, alive_agents={"a": 10.0, "b": 10.0})
    decision = decided(view, now_s=10.0, evidence=alive)
    assert decision.action is None
    assert decision.hang_order is not None and decision.hang_order.outcome is HangOutcome.NAME
    assert "a0" in decision.reason or "rank 0" in decision.reason


def test_its_members_hold_no_state() -> None:
    view = picture([agent("a")], at(PREPARING, "a0"), gathering("a0 b0"))
    left = parting(replace(view, departures={"b0": departure("b0", 1, 2)}))
    assert left is not None and left.may_stop
    assert left.reason.endswith("no state is kept")


def test_a_spare_that_prepares_is_in_no_generation() -> None:
    condition = [replace(member("a0"), committed_generation=2), *at(PREPARING, "b0"), *at(WAITING, "c0")]
    view = picture([agent("a"), agent("b"), agent("c")], condition, record(2, "a0"))
    assert decided(view).action is None


def test_which_workers_an_agent_ends() -> None:
    second = gathering("a0 b0", 3)
    assert not must_start_again(WAITING, "a0", 0, second)
    assert not must_start_again(WAITING, "c0", 0, second)  # a spare
    assert must_start_again(WAITING, "a0", 1, second)  # the record between was missed
    assert must_start_again(PREPARING, "c0", 0, second)
    assert must_start_again(LOOP, "c0", 0, second)
    assert not must_start_again(LOOP, "b0", 0, second)
    assert not must_start_again(PREPARING, "a0", 3, second)  # the same record, told again


@pytest.mark.parametrize("kind", [GATHERING, GenerationKind.PLANNED, GenerationKind.FAILOVER])
@pytest.mark.parametrize("agent_id", ["nowhere", "b"])
def test_a_placement_on_another_agent_than_its_worker_is_no_member(
    kind: GenerationKind, agent_id: str
) -> None:
    """No leader writes such a record, but a client of etcd with the right to write can: it ends no leader."""
    made = record(2, "a0 b0", kind=kind, base=0 if kind is GATHERING else 1)
    odd = replace(made, members=(replace(made.members[0], agent_id=agent_id), made.members[1]))
    for stage in (PREPARING, LOOP):
        found = decided(picture([agent("a"), agent("b")], at(stage, "a0", "b0"), odd))
        assert "lost global rank 0 on host-a" in found.reason, found.reason


def test_a_worker_that_was_answered_is_ended_though_the_gathering_lists_it() -> None:
    """The leader listed it while its key still said WAITING."""
    second = gathering("a0 b0", number=3)
    assert not must_start_again(LOOP, "a0", 0, second)  # its script asks for nothing
    for stage in (PREPARING, LOOP):
        assert must_start_again(stage, "a0", 0, second, answered=True)
