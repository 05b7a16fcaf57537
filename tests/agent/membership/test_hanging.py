"""The waits in a view of the job, and the machine's orders and reasons for them."""

from __future__ import annotations

from dataclasses import replace

from pictures import (
    FAILOVER,
    LEADER,
    POLICY,
    agent,
    decided,
    failure,
    member,
    picture,
    record,
    suspicion,
    workers,
    written,
)

from bagua_agent.membership import events as ev
from bagua_agent.membership.actions import Decision, ResultOutcome, WriteHangOrder, WriteResult
from bagua_agent.membership.hang import HangOrder
from bagua_agent.membership.hang import HangOutcome as Hang
from bagua_agent.membership.state_machine.machine import State, new_state, step
from bagua_agent.membership.state_machine.picture import absorb
from bagua_agent.membership.view import (
    Attempts,
    JobView,
    MemberView,
    SuspicionView,
)
from bagua_contract.collective_wait import CollectiveWait, Operation
from bagua_contract.records import SuspicionKind

ALIVE = replace(LEADER, alive_agents={"b": 1e6, "c": 1e6})


def stall(worker: str, generation: int = 2, *hosts: str, since_s: float = 0.0) -> SuspicionView:
    return replace(suspicion(worker, generation, broken=False), hosts=hosts, waiting_since_s=since_s)


def running(*stalls: SuspicionView, **more: object) -> JobView:
    members = [member(w, committed=2) for w in ("a0", "b0", "c0")]
    return picture(
        [agent("a"), agent("b"), agent("c")], members, record(2, "a0 b0 c0"), suspicions=stalls, **more
    )  # type: ignore[arg-type]


def decision_at(now_s: float, view: JobView) -> Decision:
    return decided(view, now_s=now_s, evidence=ALIVE)


ALL = (stall("a0"), stall("b0"), stall("c0"))


def test_an_order_stands_before_anything_is_done() -> None:
    view = running(*ALL)
    ordered = decision_at(61.0, view)
    assert ordered.action is None and ordered.hang_order is not None
    assert ordered.hang_order.outcome is Hang.RENEW
    view = replace(view, hang_order=ordered.hang_order, hang_order_since_s=61.0)
    waits = decision_at(62.0, view)
    assert waits.action is None and waits.wake_at_s == 61.0 + POLICY.stacks_first_s
    assert workers(written(decision_at(63.0, view))) == "a0 b0 c0"


def test_collectives_that_never_match_end_the_job() -> None:
    view = running(*ALL, attempts=Attempts(POLICY.hang_most_renewals))
    ordered = decision_at(1000.0, view).hang_order
    assert ordered is not None and ordered.outcome is Hang.GIVE_UP
    end = decision_at(1002.0, replace(view, hang_order=ordered, hang_order_since_s=1000.0))
    assert isinstance(end.action, WriteResult) and end.action.outcome is ResultOutcome.FAILED
    assert "do all ranks call the same ones?" in end.reason


def in_operation(worker: str, name: str, generation: int = 2) -> SuspicionView:
    wait = CollectiveWait("train.py:9", (Operation(7, 0, name),))
    return replace(stall(worker, generation), waits_in=wait)


DIFFERENT = (
    in_operation("a0", "in allreduce"),
    in_operation("b0", "in broadcast"),
    in_operation("c0", "in broadcast"),
)


def test_a_disagreement_is_ordered_after_seconds_and_ends_the_job() -> None:
    view = running(*DIFFERENT)
    early = decision_at(POLICY.disagreement_s - 0.1, view)
    assert early.action is None and early.hang_order is None and early.wake_at_s == POLICY.disagreement_s
    order = decision_at(POLICY.disagreement_s, view).hang_order
    assert order is not None and order.outcome is Hang.DISAGREE
    assert order.reason.startswith("ranks disagree: rank 0 waits in allreduce (train.py:9); ranks 1, 2")
    # Whatever happens from here on: workers go on, fail and respawn, a host is lost.
    ordered = running(
        hang_order=order, hang_order_since_s=6.0, failures=[failure("a0")], finished=frozenset({"b0"})
    )
    waits = decision_at(6.1, ordered)
    assert (
        waits.action is None and waits.hang_order is order and waits.wake_at_s == 6.0 + POLICY.stacks_first_s
    )
    end = decision_at(6.0 + POLICY.stacks_first_s, ordered)
    assert isinstance(end.action, WriteResult) and end.action.outcome is ResultOutcome.FAILED
    assert end.action.reason == order.reason


def test_one_that_goes_on_ends_the_doubt() -> None:
    assert decision_at(20.0, running(*DIFFERENT[1:])).hang_order is None


def test_an_order_about_an_earlier_generation_ends_nothing() -> None:
    old = HangOrder(1, Hang.DISAGREE, ("a0",), "ranks disagree")
    decision = decision_at(100.0, running(hang_order=old, hang_order_since_s=0.0))
    assert decision.action is None and decision.hang_order is None


def test_while_connections_are_cut_no_member_disagrees() -> None:
    cut = replace(DIFFERENT[0], hosts=("host-b",))
    order = decision_at(20.0, running(cut, *DIFFERENT[1:])).hang_order
    assert order is None or order.outcome is not Hang.DISAGREE


def test_one_that_ended_with_0_while_others_cannot_go_on_fails_the_job() -> None:
    """And no generation is made without it meanwhile."""
    broken = replace(suspicion("a0", 2, seen_s=1.0), broken_since_s=1.0, waits_in=DIFFERENT[0].waits_in)
    view = running(broken, finished=frozenset({"b0"}), finished_steps={"b0": 7})
    early = decision_at(1.1, view)
    assert (
        early.action is None and early.hang_order is None and early.wake_at_s == 1.0 + POLICY.disagreement_s
    )
    order = decision_at(1.0 + POLICY.disagreement_s, view).hang_order
    assert order is not None and order.outcome is Hang.DISAGREE
    assert order.reason == (
        "ranks disagree: rank 0 waits in allreduce (train.py:9); "
        "rank 1 ended with exit code 0 (its last report was of step 7)"
    )


def test_a_lost_node_is_not_blamed_on_one_that_ended_with_0() -> None:
    """All break out of their loops at one step; a host dies in it, so one rank completes it and ends, another can't."""
    broken = replace(suspicion("a0", 2, seen_s=1.0), broken_since_s=1.0, waits_in=DIFFERENT[0].waits_in)
    view = running(broken, finished=frozenset({"b0"}), finished_steps={"b0": 7})
    there = {w: m for w, m in view.members.items() if w == "a0"}
    lost = replace(view, members=there, agents={a: v for a, v in view.agents.items() if a != "c"})
    for now_s in (1.1, 1.0 + POLICY.disagreement_s + 0.1):
        decision = decision_at(now_s, lost)
        assert workers(written(decision)) == "a0" and decision.hang_order is None


def test_where_all_end_with_0_one_after_the_other_the_job_succeeds() -> None:
    broken = replace(suspicion("a0", 2, seen_s=1.0), broken_since_s=1.0)
    view = running(broken, finished=frozenset({"a0", "b0", "c0"}))
    end = decision_at(2.0, view)
    assert isinstance(end.action, WriteResult) and end.action.outcome is ResultOutcome.SUCCEEDED


def test_a_newcomer_that_ends_with_0_is_merely_gone() -> None:
    members = [member(w, committed=2) for w in ("a0", "b0")] + [member("c0")]
    view = picture(
        [agent("a"), agent("b"), agent("c")],
        members,
        record(3, "a0 b0 c0:3", base=2, kind=FAILOVER),
        suspicions=[suspicion("a0", 3)],
        finished=frozenset({"c0"}),
    )
    assert workers(written(decision_at(20.0, view))) == "a0 b0"


def test_a_cut_is_acted_on_at_once_and_then_costs_a_node() -> None:
    view = running(stall("a0"), stall("b0", 2, "host-c"), stall("c0", 2, "host-b"))
    again = decision_at(2.1, view)
    assert workers(written(again)) == "a0 b0 c0" and again.hang_order is None
    left = decision_at(2.1, replace(view, attempts=Attempts(1)))
    assert workers(written(left)) == "a0 b0" and left.leaves_out == ("c",)
    assert "host-b and host-c can't reach each other" in left.reason


def test_the_order_under_way_is_no_replacement_yet() -> None:
    """The last that is allowed is done before the job is given up."""
    view = running(stall("a0"), stall("c0"))
    order = decision_at(601.0, view).hang_order
    assert order is not None and order.outcome is Hang.REPLACE
    view = replace(view, hang_order=order, replacements=POLICY.hang_most_replacements)
    assert decision_at(601.0, view).hang_order is order
    given_up = decision_at(601.0, replace(view, hang_order=None))
    assert given_up.hang_order is not None and given_up.hang_order.outcome is Hang.GIVE_UP


def test_who_waits_before_the_switch_waits_for_the_same_worker_as_the_newcomer() -> None:
    """b0 hangs in the step in which all would have switched: a0 waits in generation 2, the newcomer in 3."""
    members = [member("a0", committed=2), member("b0", committed=2), member("c0")]
    view = picture(
        [agent("a"), agent("b"), agent("c")],
        members,
        record(3, "a0 b0 c0:3"),
        earlier=(record(2, "a0 b0"),),
        suspicions=(stall("a0", 2), stall("c0", 3)),
    )
    order = decision_at(601.0, view).hang_order
    assert order is not None and (order.outcome, order.workers) == (Hang.REPLACE, ("b0",))


def test_an_order_of_an_older_generation_goes() -> None:
    order = HangOrder(1, Hang.NAME, ("b0",), "")
    assert decision_at(5.0, running(hang_order=order)).hang_order is None
    lost = running(hang_order=replace(order, generation=2))
    lost = replace(lost, members={w: m for w, m in lost.members.items() if w != "b0"})
    assert decision_at(5.0, lost).hang_order is not None, "of the one in force: not probed yet"


# -- the picture


def seen(view: JobView, *happened: ev.Event) -> JobView:
    for event in happened:
        view, _, _ = absorb(view, LEADER, event, 1)
    return view


def raised(now_s: float, waited_s: float, sequence: int, generation: int = 2) -> ev.SuspicionRaised:
    return ev.SuspicionRaised(
        now_s=now_s,
        suspicion=SuspicionView(
            worker_id="a0",
            generation=generation,
            kind=SuspicionKind.STALLED,
            hosts=(),
            sequence=sequence,
            waited_s=waited_s,
        ),
    )


def test_a_wait_begins_when_its_first_report_says() -> None:
    view = seen(running(), raised(10.0, 0.5, 1), raised(12.0, 2.4, 2))
    assert view.suspicions["a0"].waiting_since_s == 9.5
    other = seen(view, raised(20.0, 0.3, 3))
    assert other.suspicions["a0"].waiting_since_s == 19.7, "less than before: another wait"
    assert seen(view, raised(20.0, 3.0, 3, generation=3)).suspicions["a0"].waiting_since_s == 17.0


def test_a_copy_that_moves_waits_since_its_newest_report() -> None:
    view = seen(running(), raised(10.0, 0.0, 1), raised(12.0, 0.0, 2))
    assert view.suspicions["a0"].waiting_since_s == 12.0
    again = seen(view, raised(15.0, 0.0, 2))
    assert again.suspicions["a0"].waiting_since_s == 12.0, "the same report, put again"
    assert seen(view, raised(15.0, 2.9, 3)).suspicions["a0"].waiting_since_s == 12.0


def test_who_went_on_is_outside_since_then() -> None:
    view = seen(running(), raised(10.0, 0.5, 1), ev.SuspicionCleared(now_s=11.0, worker_id="a0"))
    assert view.went_on == {"a0": 11.0}
    view = seen(view, ev.GenerationSeen(now_s=12.0, generation=record(3, "a0 b0 c0")))
    assert view.went_on == {}


def test_replacements_are_counted_once_and_forgiven_by_a_commit() -> None:
    order = HangOrder(2, Hang.REPLACE, ("b0", "c0"), "late")
    put = ev.HangOrderSeen(now_s=5.0, order=order)
    view = seen(running(), put, put, ev.HangOrderSeen(now_s=6.0, order=None))
    assert view.hang_order is None and view.replacements == 2
    view = seen(view, ev.GenerationSeen(now_s=7.0, generation=record(3, "a0")))
    ready = ev.MemberReady(
        now_s=8.0,
        member=MemberView(
            worker_id="a0",
            agent_id="a",
            slot=0,
            store_address="",
            fingerprint={},
            committed_generation=3,
            join_revision=100,
        ),
    )
    assert seen(view, ready).replacements == 0


def replacing(*workers: str, generation: int = 2) -> ev.HangOrderSeen:
    return ev.HangOrderSeen(now_s=5.0, order=HangOrder(generation, Hang.REPLACE, workers, "late"))


def test_an_order_that_grows_counts_each_worker_once() -> None:
    """Workers that hang together pass the timeout one after the other, while their stacks are being saved."""
    grown = seen(running(), replacing("b0"), replacing("b0", "c0"), replacing("b0", "c0", "d0"))
    assert grown.replacements == 3
    assert seen(running(), replacing("b0", "c0"), replacing("c0")).replacements == 2, (
        "b0 was killed meanwhile"
    )
    again = seen(running(), replacing("b0"), replacing("b0", generation=3))
    assert again.replacements == 2, "another hang"
    named = ev.HangOrderSeen(now_s=5.0, order=HangOrder(2, Hang.NAME, ("b0",), "late"))
    assert seen(running(), named, replacing("b0")).replacements == 1


def test_workers_that_come_back_while_their_stacks_are_saved_were_not_replaced() -> None:
    four = replacing("b0", "c0", "d0", "e0")
    waits = ev.SuspicionRaised(now_s=6.0, suspicion=stall("b0"))
    went_on = (
        ev.SuspicionRaised(now_s=6.0, suspicion=stall("c0")),
        ev.SuspicionCleared(now_s=7.0, worker_id="c0"),
    )
    view = seen(running(), four, waits, *went_on, replacing("d0", "e0"))
    assert view.replacements == 2, "d0 and e0, which still hang"
    assert seen(view, replacing("e0")).replacements == 2, "d0 was killed meanwhile"
    over = ev.HangOrderSeen(now_s=8.0, order=None)
    named = ev.HangOrderSeen(now_s=8.0, order=HangOrder(2, Hang.NAME, ("a0",), "late"))
    came_back = seen(running(), replacing("b0", "c0"), waits, *went_on)
    assert seen(came_back, over).replacements == 0
    assert seen(came_back, named).replacements == 0
    assert seen(came_back, replacing("a0", generation=3)).replacements == 1, "another hang"
    killed = ev.MemberGone(now_s=7.5, worker_id="b0")
    cleared = ev.SuspicionCleared(now_s=7.5, worker_id="b0")
    gone = seen(running(), replacing("b0"), waits, killed, cleared, over)
    assert gone.replacements == 1, "it waited, but was killed before its agent knew"


def test_four_workers_that_hang_together_are_replaced() -> None:
    """The job is not given up because of orders of which none was acted on."""
    names = ("a0", "b0", "c0", "d0", "e0")
    hung = [f"{w}0" for w in "bcde"]
    view = picture(
        [agent(w[0]) for w in names],
        [member(w, committed=2) for w in names],
        record(2, " ".join(names)),
        suspicions=(stall("a0"),),
        went_on={w: 1.0 + 0.4 * i for i, w in enumerate(hung)},
    )  # type: ignore[arg-type]
    alive = replace(LEADER, alive_agents={a: 1e6 for a in "bcde"})
    for i in range(len(hung)):
        order = decided(view, now_s=601.1 + 0.4 * i, evidence=alive).hang_order
        assert order is not None and order.outcome is Hang.REPLACE, order
        assert order.workers == tuple(hung[: i + 1])
        view = seen(view, ev.HangOrderSeen(now_s=601.1 + 0.4 * i, order=order))
    stands = decided(view, now_s=605.0, evidence=alive).hang_order
    assert stands is not None and stands.outcome is Hang.REPLACE


# -- the machine


def leading(view: JobView) -> State:
    state = step(new_state("a"), ev.LeadershipWon(now_s=0.0, revision=1), POLICY).state
    return replace(state, view=view, evidence=replace(ALIVE, elected_at_s=-1e9))


def test_an_order_is_asked_for_until_it_stands() -> None:
    def orders(now_s: float) -> list[HangOrder | None]:
        nonlocal state
        done = step(state, ev.TimePassed(now_s=now_s), POLICY)
        state = done.state
        return [a.order for a in done.actions if isinstance(a, WriteHangOrder)]

    state = leading(running(stall("a0"), stall("c0")))
    (asked,) = orders(31.0)
    assert asked is not None and asked.workers == ("b0",)
    assert orders(31.5) == [], "it is under way"
    assert len(orders(32.1)) == 1, "and perhaps was not done"
    state = step(state, ev.HangOrderSeen(now_s=32.2, order=asked), POLICY).state
    assert orders(40.0) == []
    done = step(state, ev.SuspicionCleared(now_s=41.0, worker_id="a0"), POLICY)
    state = step(done.state, ev.SuspicionCleared(now_s=41.0, worker_id="c0"), POLICY).state
    assert orders(42.5) == [None]


def test_a_newcomer_that_could_not_enter_does_not_wait() -> None:
    """Its communicator broke while it came in: that makes the pending record anew, and names no worker as late."""
    broken = suspicion("d0", 3, seen_s=0.0)
    view = running(broken)
    pending = record(3, "a0 b0 c0 d0:3")
    agents = {**view.agents, "d": agent("d")}
    view = replace(view, generation=pending, members={**view.members, "d0": member("d0")}, agents=agents)
    knows = replace(LEADER, alive_agents={a: 1e6 for a in "bcd"})
    for now_s in (31.0, 700.0):
        decision = decided(view, now_s=now_s, evidence=knows)
        assert decision.hang_order is None
        assert (
            workers(written(decision)) == "a0 b0 c0 d0" and "could not be built on host-d" in decision.reason
        )
