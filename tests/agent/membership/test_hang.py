"""Tables and a property: the workers that are named, those that are replaced, and those that never are."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bagua_agent.membership.hang import (
    HangOrder,
    HangOutcome,
    HangSituation,
    MemberState,
    decide_hang,
    order_for,
    wait_began_s,
)
from bagua_agent.membership.policy import Policy
from bagua_contract.collective_wait import CollectiveWait, Operation

LIMITS = Policy().hang_limits


def job(*waiting_since_s: float | None, **rest: object) -> HangSituation:
    """Members by rank; None is outside."""
    members = tuple(
        MemberState(f"w{n}", n, f"node-{n}", waiting_since_s=since) for n, since in enumerate(waiting_since_s)
    )
    return replace(HangSituation(7, members, usual_step_s=0.5), **rest)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("situation", "now_s", "outcome", "workers", "wake_at_s"),
    [
        (job(None, None, None), 1e6, HangOutcome.NOTHING, (), None),
        (job(None), 1e6, HangOutcome.NOTHING, (), None),
        # one is late: first nothing, then named, then replaced
        (job(0.0, None, 5.0), 29.0, HangOutcome.NOTHING, (), 30.0),
        (job(0.0, None, 5.0), 30.0, HangOutcome.NAME, ("w1",), 600.0),
        (job(0.0, None, 5.0), 599.0, HangOutcome.NAME, ("w1",), 600.0),
        (job(0.0, None, 5.0), 600.0, HangOutcome.REPLACE, ("w1",), None),
        # several are
        (job(0.0, None, None), 600.0, HangOutcome.REPLACE, ("w1", "w2"), None),
        # a long step has long patience
        (job(0.0, None, usual_step_s=20.0), 199.0, HangOutcome.NOTHING, (), 200.0),
        (job(0.0, None, usual_step_s=20.0), 200.0, HangOutcome.NAME, ("w1",), 600.0),
        (job(0.0, None, usual_step_s=100.0), 999.0, HangOutcome.NOTHING, (), 1000.0),
        (job(0.0, None, usual_step_s=100.0), 1000.0, HangOutcome.REPLACE, ("w1",), None),
        # before the first step nothing is usual
        (job(0.0, None, usual_step_s=None), 30.0, HangOutcome.NAME, ("w1",), 600.0),
        # all inside: from the last that came in
        (job(0.0, 500.0), 559.0, HangOutcome.NOTHING, (), 560.0),
        (job(0.0, 500.0), 560.0, HangOutcome.RENEW, ("w0", "w1"), None),
        (job(0.0, 0.0, renewals=1), 60.0, HangOutcome.NOTHING, (), 120.0),
        (job(0.0, 0.0, renewals=3), 480.0, HangOutcome.RENEW, ("w0", "w1"), None),
        (job(0.0, 0.0, renewals=4), 960.0, HangOutcome.GIVE_UP, ("w0", "w1"), None),
        # a script that hangs wherever it is started again
        (job(0.0, None, replacements=3), 600.0, HangOutcome.GIVE_UP, ("w1",), None),
    ],
)
def test_rules(
    situation: HangSituation,
    now_s: float,
    outcome: HangOutcome,
    workers: tuple[str, ...],
    wake_at_s: float | None,
) -> None:
    decision = decide_hang(situation, now_s, LIMITS)
    assert (decision.outcome, decision.workers, decision.wake_at_s) == (outcome, workers, wake_at_s)
    assert decision.reason


def with_member(situation: HangSituation, number: int, **changes: object) -> HangSituation:
    members = list(situation.members)
    members[number] = replace(members[number], **changes)  # type: ignore[arg-type]
    return replace(situation, members=tuple(members))


def test_one_that_goes_on_within_a_step_is_not_late() -> None:
    # rank 1 last left a wait at 590: since then, not since 0, the others wait for it
    situation = with_member(job(0.0, None), 1, outside_since_s=590.0)
    assert decide_hang(situation, 619.0, LIMITS).outcome is HangOutcome.NOTHING
    assert decide_hang(situation, 620.0, LIMITS).outcome is HangOutcome.NAME
    assert decide_hang(situation, 1190.0, LIMITS).outcome is HangOutcome.REPLACE


def test_only_the_slowest_is_replaced_while_others_may_come() -> None:
    situation = with_member(job(0.0, None, None), 2, outside_since_s=560.0)
    decision = decide_hang(situation, 600.0, LIMITS)
    assert (decision.outcome, decision.workers) == (HangOutcome.REPLACE, ("w1",))
    assert "node-1, global rank 2 on node-2" in decision.reason


def test_a_silent_agent_is_another_ones_case() -> None:
    situation = with_member(job(0.0, None), 1, answers=False)
    assert decide_hang(situation, 1e6, LIMITS).outcome is HangOutcome.NOTHING


def test_the_only_holder_is_named_and_not_killed() -> None:
    situation = with_member(job(0.0, None), 0, holder=False)
    decision = decide_hang(situation, 1e6, LIMITS)
    assert decision.outcome is HangOutcome.NAME and "no other worker has the job's state" in decision.reason


def test_never_means_never() -> None:
    never = replace(LIMITS, hang_timeout_s=None)
    assert decide_hang(job(0.0, None), 1e9, never).outcome is HangOutcome.NAME
    assert decide_hang(job(0.0, 0.0, renewals=9), 1e9, never).outcome is HangOutcome.RENEW


def test_the_reason_names_the_workers_and_the_time() -> None:
    assert decide_hang(job(0.0, None, 3.0, 3.0), 45.0, LIMITS).reason == (
        "3 of 4 wait for global rank 1 on node-1: 45 s outside the step's collectives (a step usually takes 0.5 s)"
    )
    many = decide_hang(job(0.0, *[None] * 9), 45.0, LIMITS).reason
    assert "global rank 4 on node-4 and 5 more: 45 s" in many


def test_a_report_that_took_long_makes_a_wait_younger() -> None:
    assert wait_began_s(100.0, 2.5) == 97.5


def test_limits_are_checked() -> None:
    with pytest.raises(ValueError, match="hang_timeout_s must be greater than 0, not -1"):
        replace(LIMITS, hang_timeout_s=-1)


def test_an_order_stands_as_long_as_what_it_says() -> None:
    named = decide_hang(job(0.0, None, None), 31.0, LIMITS)
    order = order_for(named, 7, None)
    assert order == HangOrder(7, HangOutcome.NAME, ("w1", "w2"), named.reason)
    later = decide_hang(job(0.0, None, None), 40.0, LIMITS)
    assert later.reason != named.reason and order_for(later, 7, order) is order, "time alone is no news"
    fewer = decide_hang(job(0.0, None, 35.0), 40.0, LIMITS)
    assert order_for(fewer, 7, order) is order, "one of them came: nothing new to be done"
    swapped = decide_hang(job(0.0, 35.0, None), 40.0, LIMITS)
    assert order_for(swapped, 7, HangOrder(7, HangOutcome.NAME, ("w1",), "")) != order
    assert order_for(decide_hang(job(None, None, None), 41.0, LIMITS), 7, order) is None
    replaced = order_for(decide_hang(job(0.0, None, None), 600.0, LIMITS), 7, order)
    assert replaced is not None and replaced.outcome is HangOutcome.REPLACE
    came = order_for(decide_hang(job(0.0, 590.0, None), 601.0, LIMITS), 7, replaced)
    assert came is not None and came.workers == ("w2",), "who came meanwhile is spared"
    assert order_for(named, 8, order) == HangOrder(8, HangOutcome.NAME, ("w1", "w2"), named.reason)


def cut(*waiting_since_s: float | None, **rest: object) -> HangSituation:
    """As `job`, and ranks 0 and 1 hear nothing from each other."""
    situation = with_member(job(*waiting_since_s, **rest), 0, cannot_reach=("node-1",))
    return with_member(situation, 1, cannot_reach=("node-0",))


@pytest.mark.parametrize(
    ("situation", "now_s", "outcome", "wake_at_s"),
    [
        (cut(0.0, 0.0, 0.1), 2.0, HangOutcome.NOTHING, 2.1),
        (cut(0.0, 0.0, 0.1), 2.2, HangOutcome.RENEW, None),
        (cut(0.0, 0.0, 0.0, renewals=1), 2.2, HangOutcome.RENEW, None),
        (cut(0.0, 0.0, 0.0, renewals=2), 2.2, HangOutcome.NOTHING, 4.0),
        # no node can be left out: tried once a minute, and never given up, for the script is not to blame
        (cut(0.0, 0.0, 0.0, renewals=50), 59.0, HangOutcome.NOTHING, 60.0),
        (cut(0.0, 0.0, 0.0, renewals=50), 60.0, HangOutcome.RENEW, None),
        # one saves a checkpoint: the others wait for that, whatever else is wrong
        (cut(0.0, 0.0, None), 29.0, HangOutcome.NOTHING, 30.0),
        (cut(0.0, 0.0, None), 31.0, HangOutcome.NAME, 600.0),
        # one that comes in tells of no wait
        (with_member(cut(0.0, 0.0, None), 2, newcomer=True), 2.2, HangOutcome.RENEW, None),
        (with_member(job(0.0, None), 1, newcomer=True), 31.0, HangOutcome.NAME, 600.0),
        # whether it lives is still asked
        (with_member(cut(0.0, 0.0, 0.0), 1, answers=False), 9.0, HangOutcome.NOTHING, None),
    ],
)
def test_a_cut_that_the_transport_names_is_no_slow_checkpoint(
    situation: HangSituation, now_s: float, outcome: HangOutcome, wake_at_s: float | None
) -> None:
    decision = decide_hang(situation, now_s, LIMITS)
    assert (decision.outcome, decision.wake_at_s) == (outcome, wake_at_s and pytest.approx(wake_at_s))
    assert decision.cut is (outcome is HangOutcome.RENEW)


def test_a_cut_is_told_once_a_node_and_needs_no_stacks() -> None:
    decision = decide_hang(cut(0.0, 0.0, 0.0), 3.0, LIMITS)
    assert decision.reason == (
        "all wait and node-0 gets no answer from node-1; node-1 gets no answer from node-0"
    )
    assert order_for(decision, 7, HangOrder(7, HangOutcome.NAME, ("w1",), "")) is None


SINCE = st.none() | st.floats(0.0, 1000.0)


@given(
    st.lists(st.tuples(SINCE, SINCE, st.booleans(), st.booleans()), min_size=1, max_size=6),
    st.floats(1000.0, 3000.0),
    st.none() | st.floats(0.001, 100.0),
    st.integers(0, 5),
    st.integers(0, 5),
)
def test_what_always_holds(
    states: list[tuple[float | None, float | None, bool, bool]],
    now_s: float,
    usual_s: float | None,
    renewals: int,
    replacements: int,
) -> None:
    members = tuple(
        MemberState(f"w{n}", n, f"node-{n}", waiting, outside, answers, holder)
        for n, (waiting, outside, answers, holder) in enumerate(states)
    )
    decision = decide_hang(HangSituation(1, members, usual_s, renewals, replacements), now_s, LIMITS)
    inside = {m.worker_id for m in members if m.waiting_since_s is not None}
    concerned = set(decision.workers)
    if decision.outcome is HangOutcome.REPLACE:
        assert concerned and not concerned & inside, "no worker that waits is killed"
        assert any(m.holder and m.worker_id not in concerned for m in members), "the state outlives it"
        first_s = min(m.waiting_since_s for m in members if m.waiting_since_s is not None)
        assert now_s - first_s >= 600.0
    if decision.outcome is HangOutcome.RENEW and not decision.cut:
        assert inside == {m.worker_id for m in members}
    if decision.outcome is not HangOutcome.NOTHING:
        assert concerned and all(m.answers for m in members)
    if decision.wake_at_s is not None:
        assert decision.wake_at_s > now_s or decision.wake_at_s == pytest.approx(now_s)
        later = decide_hang(
            HangSituation(1, members, usual_s, renewals, replacements), decision.wake_at_s + 1e-6, LIMITS
        )
        again = later.outcome is decision.outcome and later.wake_at_s is not None
        assert not again or later.wake_at_s > decision.wake_at_s + 1e-3, "a busy loop"


def test_a_short_timeout_is_not_lengthened_by_the_notice() -> None:
    assert Policy(hang_timeout_s=5.0).hang_limits.notice_s == 5.0
    assert Policy(hang_timeout_s=None).hang_limits.notice_s == Policy().hang_notice_s
    assert Policy().hang_limits.notice_s == Policy().hang_notice_s


def test_a_shard_that_is_held_up_by_its_mate_does_not_hide_that_ranks_disagree() -> None:
    """Rank 1 waits in collectives of its replica, which are not reported, for rank 0, which waits elsewhere."""

    def waits_in(name: str) -> CollectiveWait:
        return CollectiveWait("train.py:9", (Operation(7, 0, name),))

    situation = job(0.0, None, 0.0, 0.0)
    members = [
        replace(m, waits_in=waits_in("at the step boundary" if m.global_rank == 0 else "in the reductions"))
        for m in situation.members
    ]
    members[1] = replace(members[1], waits_in=None)
    alone = replace(situation, members=tuple(members))
    assert decide_hang(alone, LIMITS.disagreement_s, LIMITS).outcome is HangOutcome.NOTHING, "it may come"
    members[1] = replace(members[1], mate_waits=True)
    held = replace(situation, members=tuple(members))
    soon = decide_hang(held, LIMITS.disagreement_s - 1.0, LIMITS)
    assert (soon.outcome, soon.wake_at_s) == (HangOutcome.NOTHING, LIMITS.disagreement_s)
    assert decide_hang(held, LIMITS.disagreement_s, LIMITS).outcome is HangOutcome.DISAGREE
    alike = tuple(replace(m, waits_in=waits_in("in the reductions")) for m in members)
    agreed = replace(situation, members=(*alike[:1], replace(alike[1], waits_in=None), *alike[2:]))
    assert decide_hang(agreed, LIMITS.disagreement_s, LIMITS).outcome is HangOutcome.NOTHING
