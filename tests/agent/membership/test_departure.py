"""Departure of all holders: its detection, the saved state, and the claims that a leaving node may make."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from pictures import (
    FAILOVER,
    LEADER,
    POLICY,
    agent,
    decided,
    departure,
    failure,
    member,
    picture,
    record,
    workers,
    written,
)

from bagua_agent.membership.actions import ResultOutcome, WriteResult
from bagua_agent.membership.formation.departure import parting, prospect
from bagua_agent.membership.view import DepartureView, JobView, Waiting

EMPTY = record(3, "", base=2)


def saved(worker: str, part: int, *, step: int = 7, parts: int = 2, **more: Any) -> DepartureView:
    return departure(worker, 2, 2, step=step, part=part, parts=parts, **{"written": True, **more})


def left(*departures: DepartureView, **more: Any) -> JobView:
    """Two nodes trained in generation 2 and were asked to leave."""
    view = picture(
        [agent("a", leaving=True), agent("b", leaving=True)], [], EMPTY, earlier=(record(2, "a0 b0"),)
    )
    view = replace(view, departures={d.worker_id: d for d in departures}, committed_generation=2)
    return replace(view, **{"has_checkpoints": True, **more})


def result(view: JobView) -> WriteResult:
    action = decided(view).action
    assert isinstance(action, WriteResult), decided(view).reason
    return action


def test_parts_of_replicas_that_differ_are_not_one_checkpoint() -> None:
    half = (saved("a0", 0, replica="a"), saved("b0", 1, replica="b"))
    found = parting(left(*half))
    assert found is not None and not found.may_stop
    whole = parting(left(saved("a0", 0, replica="a"), saved("b0", 1, replica="a")))
    assert whole is not None and whole.may_stop


def test_stopped_once_every_holder_confirmed_and_its_part_is_written() -> None:
    half = left(saved("a0", 0))
    assert parting(half) is None and decided(half).action is None
    both = result(left(saved("a0", 0), saved("b0", 1)))
    assert (both.outcome, both.reason) == (
        ResultOutcome.STOPPED,
        "every worker left; the checkpoint of step 7 is written",
    )


@pytest.mark.parametrize(
    ("b0", "why"),
    [
        (
            saved("b0", 1, written=False, problem="No space left on device"),
            "No space left on device (on host-b)",
        ),
        (departure("b0", 2, 2), "a worker ended before its part was written"),
        (saved("b0", 1, step=6), "a worker ended before its part was written"),
    ],
    ids=["the disk is full", "ended at once", "one commit behind"],
)
def test_a_checkpoint_that_is_not_whole_stops_nothing_and_is_told(b0: DepartureView, why: str) -> None:
    view = left(saved("a0", 0), b0)
    assert decided(view).action is None
    assert (
        decided(view).reason
        == f"not marked stopped: every worker left, but the checkpoint of step 7 is not whole: {why}"
    )


def test_the_whole_state_of_one_survivor_counts() -> None:
    view = left(saved("a0", 0, parts=1), failures={"b0": failure("b0")})
    assert parting(view) is not None and parting(view).may_stop  # type: ignore[union-attr]


def test_replicas_that_differ_are_saved_by_the_first_alone() -> None:
    view = left(saved("a0", 0, parts=1), saved("b0", 0, parts=0, written=False))
    assert result(view).outcome is ResultOutcome.STOPPED


def test_without_checkpoints_departures_are_enough() -> None:
    view = left(departure("a0", 2, 2), departure("b0", 2, 2), has_checkpoints=False)
    assert result(view).outcome is ResultOutcome.STOPPED


def test_a_host_that_is_gone_without_a_word_may_come_back_with_the_state() -> None:
    """L1: two histories otherwise, should it have gone on."""
    view = left(saved("a0", 0))
    view = replace(view, agents={"a": agent("a", leaving=True)})
    assert parting(view) is None
    told = prospect(view, "a", others_stay=False, ends_when_all_leave=True)
    assert told.awaits_result and "workers on host-b have not been seen to end" in told.text
    started_again = replace(view, agents={"c": agent("c")}, members={"c0": member("c0")})
    waits = decided(started_again)
    assert waits.action is None and waits.waiting is Waiting.HOLDER


@pytest.mark.parametrize("knows_base", [True, False], ids=["the leader", "a new leader"])
def test_the_next_start_begins_at_once_if_no_leader_wrote_the_result(knows_base: bool) -> None:
    view = left(saved("a0", 0), saved("b0", 1, written=False), **({} if knows_base else {"earlier": ()}))
    again = replace(view, agents={"c": agent("c")}, members={"c0": member("c0")})
    ready = replace(again, desired=replace(again.desired, max_nodes=1)) if again.desired else again
    new = written(decided(ready))
    assert (workers(new), new.kind, new.base) == ("c0", FAILOVER, 0)
    assert new.reason.startswith("from the newest checkpoint, since every worker left, but")
    anew = written(decided(replace(ready, has_checkpoints=False)))
    assert anew.reason.startswith("anew, since every worker left")


def test_a_failure_long_after_others_left_is_no_leave() -> None:
    """The last holder failed. That a node left before says nothing of it, so the job does not begin anew."""
    view = left(departure("a0", 1, 2), generation=record(2, "b0"), earlier=())
    view = replace(
        view,
        failures={"b0": failure("b0", script=False)},
        agents={"b": agent("b")},
        members={"b0x": member("b0x")},
        has_checkpoints=False,
    )
    assert parting(view) is None
    assert result(view).outcome is ResultOutcome.FAILED


def test_a_failure_while_all_leave_stops_the_job_but_no_start_goes_over_it_in_silence() -> None:
    view = left(departure("a0", 2, 2), failures={"b0": failure("b0", script=False)}, has_checkpoints=False)
    assert result(view).outcome is ResultOutcome.STOPPED
    again = replace(view, agents={"c": agent("c")}, members={"c0": member("c0")})
    assert result(again).outcome is ResultOutcome.FAILED


def test_newcomers_that_never_had_the_state_need_not_confirm() -> None:
    """A newcomer was let in for the state, and its only holder ended before it could copy."""
    third = record(3, "a0 c0:3")
    view = replace(left(saved("a0", 0, parts=1)), generation=third, earlier=())
    assert parting(view) is not None
    assert parting(replace(view, committed_generation=3)) is None


def test_nothing_trained() -> None:
    view = left(departure("a0", 1), committed_generation=0, generation=record(1, "a0", base=0), earlier=())
    assert result(view).reason == "every worker left before the first step"


@pytest.mark.parametrize(
    ("view", "others_stay", "scheduled", "goes_on", "awaits", "text"),
    [
        (
            left(saved("a0", 0), generation=record(3, "b0")),
            True,
            False,
            True,
            False,
            "the job goes on without this node",
        ),
        (
            left(saved("a0", 0)),
            True,
            False,
            True,
            False,
            "the state stays on host-b, which waits for enough nodes",
        ),
        (left(saved("a0", 0), saved("b0", 1)), True, False, True, False, "begin again: every worker left"),
        (left(saved("a0", 0), saved("b0", 1)), False, False, False, True, "no leader marked the job stopped"),
        (left(saved("a0", 0), saved("b0", 1)), False, True, False, False, "its scheduler says what follows"),
        (
            left(saved("a0", 0), departure("b0", 2, 2)),
            False,
            False,
            False,
            False,
            "the newest whole checkpoint",
        ),
        (left(saved("a0", 0)), False, False, False, True, "host-b have not been seen to end"),
    ],
)
def test_what_a_node_says_when_it_leaves(
    view: JobView, others_stay: bool, scheduled: bool, goes_on: bool, awaits: bool, text: str
) -> None:
    found = prospect(view, "a", others_stay=others_stay, ends_when_all_leave=not scheduled)
    assert (found.goes_on, found.awaits_result) == (goes_on, awaits)
    assert text in found.text


def test_a_scheduled_job_is_never_marked_stopped_here() -> None:

    view = left(saved("a0", 0), saved("b0", 1))
    found = decided(view, evidence=LEADER, policy=replace(POLICY, ends_when_all_leave=False))
    assert not isinstance(found.action, WriteResult)


def test_workers_that_left_in_the_first_step_say_that_nothing_was_committed() -> None:
    """One of them left first, so there is a record after the first one."""
    first, empty = record(1, "a0 b0", base=0), record(2, "", base=1, kind=FAILOVER)
    view = picture([agent("a", leaving=True), agent("b", leaving=True)], [], empty, earlier=(first,))
    view = replace(view, has_checkpoints=True)
    nothing = [departure(worker, 1, 2, holds_nothing=True) for worker in ("a0", "b0")]
    both = replace(view, departures={d.worker_id: d for d in nothing})
    assert both.has_trained, "as far as the records tell"
    assert (result(both).outcome, result(both).reason) == (
        ResultOutcome.STOPPED,
        "every worker left before the first step",
    )
    silent = departure("b0", 1, 2)
    one = replace(view, departures={"a0": nothing[0], "b0": silent})
    assert decided(one).action is None, "b0 was killed, and may have committed"
