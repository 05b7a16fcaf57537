"""The life of a simulated job: cases by hand, sums that must hold, and the runtime's own membership beside it."""

from __future__ import annotations

import numpy as np
import pytest

from bagua_contract.records import GenerationKind
from benchmarks.scaling.life.events import EventQueue, FailureModel, NodeEvent, What, node_events
from benchmarks.scaling.life.history import Account, History, JobShape, checkpoint_interval_s
from benchmarks.scaling.life.membership import Membership
from benchmarks.scaling.life.recovery import (
    SYSTEMS,
    Assumptions,
    Recovery,
    join_pause_s,
    measured,
    pause_s,
    reform_s,
)

NEVER_S = 1e9
PLAIN = Assumptions(group_s=0.0, group_each_s=0.0, torchrun_each_s=0.0, checkpoint_s=5.0)
ELASTIC = Recovery("torchft", 2.0, 8.0, 1.0, 30.0, restarts_all=False)
RESTARTED = Recovery("torchrun", 40.0, 1840.0, 6.0, 30.0, restarts_all=True)
SHAPE = JobShape(nodes=4, step_s=2.0, compute_s=1.0, copy_s=3.0)


def total_s(account: Account) -> float:
    parts = (account.useful_s, account.missing_s, account.paused_s, account.redone_s, account.checkpoints_s)
    return sum(parts)


def test_a_loss_and_a_join_by_hand() -> None:
    """Lost at 100: 2 s of pause, half a step again, 3 of 4 nodes until one is ready at 230; then 1 + 1 s of pause."""
    events = [NodeEvent(100.0, 1, What.FAILED), NodeEvent(200.0, 1, What.REPAIRED)]
    account = History(SHAPE, ELASTIC, PLAIN, NEVER_S).run(events, 300.0)
    with_three = 2.0 / (1.0 + 4 / 3)
    assert SHAPE.share(3) == pytest.approx(with_three)
    assert account.paused_s == pytest.approx(2.0 + 2.0)  # a step of 2 s hides a part of the copy of 3 s
    assert account.redone_s == pytest.approx(1.0)
    assert account.missing_s == pytest.approx(128.0 * (1 - with_three))
    assert account.useful_s == pytest.approx(100.0 - 1.0 + 128.0 * with_three + 68.0)
    assert total_s(account) == pytest.approx(300.0)
    assert (account.losses, account.joins) == (1, 1)


def test_a_system_that_restarts_goes_back_to_its_checkpoint() -> None:
    """Checkpoints at 40 and 80 take 5 s each; what was trained from 85 to 100 is lost, and again at the join."""
    events = [NodeEvent(100.0, 0, What.FAILED), NodeEvent(150.0, 0, What.REPAIRED)]
    account = History(SHAPE, RESTARTED, PLAIN, 40.0).run(events, 200.0)
    share = SHAPE.share(3)
    # stops at 100 for 40 + 3 s; checkpoint at 160; joined at 180, for 6 + 3 s
    assert account.redone_s == pytest.approx(15.0 + 15.0 * share)
    assert account.paused_s == pytest.approx(43.0 + 9.0)
    assert account.checkpoints_s == pytest.approx(3 * 5.0)
    assert total_s(account) == pytest.approx(200.0)


def test_silence_is_dearer() -> None:
    silent = [NodeEvent(100.0, 1, What.FAILED, is_silent=True)]
    account = History(SHAPE, ELASTIC, PLAIN, NEVER_S).run(silent, 300.0)
    assert account.paused_s == pytest.approx(8.0)


def test_a_node_that_fails_again_before_it_joined_is_lost_once() -> None:
    events = [
        NodeEvent(100.0, 1, What.FAILED),
        NodeEvent(110.0, 1, What.REPAIRED),
        NodeEvent(120.0, 1, What.FAILED),
        NodeEvent(170.0, 1, What.REPAIRED),
    ]
    account = History(SHAPE, ELASTIC, PLAIN, NEVER_S).run(events, 300.0)
    assert (account.losses, account.joins) == (1, 1)


@pytest.mark.parametrize("recovery", (ELASTIC, RESTARTED), ids=lambda r: r.system)
def test_every_second_is_accounted_for(recovery: Recovery) -> None:
    """With overlapping failures too, and with the leader's decisions beside: they must name the same nodes."""
    random = np.random.default_rng(5)
    events = node_events(8, FailureModel(3000.0, 200.0, 0.3), 6000.0, random)
    assert sum(event.what is What.FAILED for event in events) > 8
    shape = JobShape(8, 2.0, 1.5, 3.0)
    account = History(shape, recovery, PLAIN, 300.0, Membership(8)).run(events, 6000.0)
    assert total_s(account) == pytest.approx(6000.0)
    assert 0 < account.goodput < account.goodput_of_present <= 1
    again = node_events(8, FailureModel(3000.0, 200.0, 0.3), 6000.0, np.random.default_rng(5))
    assert again == events


def test_failures_come_at_their_rate() -> None:
    model = FailureModel(1000.0, 10.0)
    events = node_events(50, model, 20_000.0, np.random.default_rng(1))
    failures = [event for event in events if event.what is What.FAILED]
    assert len(failures) == pytest.approx(50 * 20_000 / 1010, rel=0.1)
    assert [event.at_s for event in events] == sorted(event.at_s for event in events)
    up = 50
    for event in events:
        up += 1 if event.what is What.REPAIRED else -1
        assert 1 <= up <= 50


def test_the_leader_decides_as_in_a_real_job() -> None:
    membership = Membership(200)
    assert (membership.began.kind, membership.began.nodes) == (GenerationKind.PLANNED, 200)
    lost = membership.lose(membership.nodes[7], 50.0)
    assert (lost.kind, lost.nodes) == (GenerationKind.FAILOVER, 199)
    assert 0 < lost.waited_s < 1  # it gathers further losses for a moment
    joined = membership.join(90.0)
    assert (joined.kind, joined.nodes) == (GenerationKind.PLANNED, 200)


def test_recovery_times_are_those_of_the_kept_results() -> None:
    found = measured(Assumptions())
    assert set(found) == set(SYSTEMS)
    assert found["bagua"].kill_s < found["torchft"].kill_s < found["torchrun"].kill_s
    assert found["torchrun"].silent_s > 1800
    assert reform_s(0) == 0 and reform_s(64) < reform_s(1024) < reform_s(4096) == reform_s(9999)
    small, large = (pause_s(found["bagua"], nodes, False, 9.0, Assumptions()) for nodes in (8, 1024))
    assert small < large < 5
    assert join_pause_s(ELASTIC, 8, 3.0, 0.5, PLAIN) == pytest.approx(1.0 + 2.5)
    assert join_pause_s(ELASTIC, 8, 3.0, 9.0, PLAIN) == pytest.approx(1.0)
    assert join_pause_s(RESTARTED, 8, 3.0, 9.0, PLAIN) == pytest.approx(6.0 + 3.0)
    assert pause_s(RESTARTED, 8, False, 3.0, PLAIN) == pytest.approx(40.0 + 3.0)


def test_the_queue_keeps_the_order_of_equal_times() -> None:
    queue: EventQueue[str] = EventQueue()
    for at_s, name in ((2.0, "b"), (1.0, "a"), (2.0, "c")):
        queue.add(at_s, name)
    assert [queue.take(9.0), queue.take(9.0), queue.take(2.0), queue.take(9.0)] == [
        (1.0, "a"),
        (2.0, "b"),
        None,
        (2.0, "c"),
    ]
    with pytest.raises(ValueError, match="lies before"):
        queue.add(1.0, "late")
    assert checkpoint_interval_s(5.0, 1000.0) == pytest.approx(100.0)
