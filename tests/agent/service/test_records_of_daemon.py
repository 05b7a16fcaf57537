"""What a daemon does with records that are removed, lost or set back, decided without IO, in any order of events."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations

import pytest

from bagua_agent.cluster.cluster_policy import DAY_S
from bagua_agent.cluster.cluster_records import UnreadableRecord, write_removal
from bagua_agent.cluster.cluster_view import RemovalView, UnitState
from bagua_agent.etcd import cluster_keys
from bagua_agent.service.state_machine import messages as ms
from bagua_agent.service.state_machine.machine import TRY_AGAIN_S
from bagua_contract import cluster_pb2 as pb
from tests.agent.cluster_state.test_odd_records import orders, submission
from tests.agent.service.test_state_machine import (
    DRAINED,
    ENDED,
    EXITED,
    JOB,
    NODE,
    NONCE,
    ORDERED,
    ORDERS_KEY,
    OUTCOME_KEY,
    REMOVAL_KEY,
    REMOVED,
    SUBMISSION_KEY,
    SUBMITTED,
    UNIX_S,
    Daemon,
    changed,
    of,
    running,
)


def running_since_a_backup() -> Daemon:
    """Its orders and its submission were written at revision 100; the backup ends before."""
    daemon = running()
    for event in (SUBMITTED, ORDERED):
        daemon.take(ms.RecordChanged(replace(event.change, mod_revision=100)))
    return daemon


def test_no_unit_starts_on_an_order_of_another_job_of_its_name() -> None:
    """As one that the scheduler had not withdrawn yet when the job was removed, and its name submitted again."""
    daemon = Daemon(SUBMITTED, changed(ORDERS_KEY, orders(JOB, nonce="nonce-0")))
    assert not of(ms.StartUnit, daemon.take(DRAINED)) and daemon.unit_state() is UnitState.WAITING
    daemon.take(changed(ORDERS_KEY, orders(JOB, nonce=NONCE), 3))
    assert of(ms.StartUnit, daemon.take(DRAINED))


@pytest.mark.parametrize("order", list(permutations([SUBMITTED, ENDED, REMOVED])))
def test_a_removed_job_is_forgotten_whatever_is_heard_first(order: tuple[ms.RecordChanged, ...]) -> None:
    """An outcome that names no submission may be that of the next job of this name, unless it is the known one's."""
    daemon = Daemon(*order)
    assert not daemon.state.submissions
    assert bool(daemon.state.outcomes) == (order[-1] is not REMOVED)


LOST = [
    (SUBMISSION_KEY, SUBMITTED, NONCE),
    (OUTCOME_KEY, ENDED, NONCE),
    (ORDERS_KEY, ORDERED, ""),
    (REMOVAL_KEY, REMOVED, ""),
]


@pytest.mark.parametrize(("key", "event", "nonce"), LOST)
def test_a_key_that_etcd_lost_is_put_back_until_it_stands_again(
    key: str, event: ms.RecordChanged, nonce: str
) -> None:
    daemon = Daemon(SUBMITTED, event)
    value = event.change.value
    assert value is not None
    put = ms.PutBack(key, value, nonce)
    assert daemon.take(changed(key, None)) == (put,)
    daemon.take(ms.NotDone(f"putting {key} back failed: etcd is away"))
    daemon.now_s += TRY_AGAIN_S
    assert of(ms.PutBack, daemon.take(DRAINED)) == [put]
    assert daemon.said(ms.StandsAgain(put, True)) == [
        f"etcd has lost {key}; it is put back as this node remembers it"
    ]
    assert not daemon.state.to_put_back


@pytest.mark.parametrize(("key", "event", "nonce"), LOST)
def test_a_daemon_that_was_out_of_touch_puts_nothing_back(
    key: str, event: ms.RecordChanged, nonce: str
) -> None:
    daemon = Daemon(event)
    daemon.may_put_back = False
    assert daemon.said(changed(key, None)) == [
        f"{key} is gone; this node was out of touch for so long that it does not put it back"
    ]
    assert not daemon.state.to_put_back and not daemon.state.submissions and not daemon.state.outcomes
    assert daemon.state.orders is None and daemon.state.orders_value is None


def test_a_daemon_that_was_out_of_touch_starts_nothing_of_the_orders_that_are_gone() -> None:
    """They were empty when the scheduler removed them, days after it had lost this node."""
    daemon = running()
    daemon.take(ms.UnitsSeen((EXITED,)))
    daemon.may_put_back = False
    daemon.take(changed(ORDERS_KEY, None))
    daemon.now_s += 60.0
    assert not of(ms.StartUnit, daemon.take(DRAINED))
    alive = running()
    alive.may_put_back = False
    alive.take(changed(ORDERS_KEY, None))
    assert not of(ms.ActOnUnit, alive.take(DRAINED)), "absence ends nothing"
    assert alive.unit_state() is UnitState.RUNNING


def test_what_is_to_be_put_back_is_dropped_once_its_job_is_removed() -> None:
    daemon = Daemon(SUBMITTED, changed(SUBMISSION_KEY, None))
    assert daemon.state.to_put_back
    assert daemon.take(REMOVED) == (ms.RemoveLogs(JOB, NONCE),)
    assert not daemon.state.to_put_back and not daemon.state.submissions


def test_a_removal_forgets_an_ended_unit_and_leaves_a_living_one_to_the_plan() -> None:
    ended = running()
    ended.take(ms.UnitsSeen((EXITED,)))
    assert ended.take(REMOVED) == (ms.ActOnUnit(JOB, ms.UnitAct.REMOVE), ms.RemoveLogs(JOB, NONCE))
    assert not ended.state.units
    living = running()
    assert living.take(REMOVED) == (ms.RemoveLogs(JOB, NONCE),)
    assert living.state.units[JOB].alive


def test_a_removal_at_the_end_of_its_time_is_not_put_back() -> None:
    old = RemovalView(JOB, UNIX_S - 10 * DAY_S)
    daemon = Daemon(changed(REMOVAL_KEY, write_removal(old)))
    assert daemon.take(changed(REMOVAL_KEY, None)) == ()


def test_orders_of_a_backup_end_no_unit_and_are_written_over() -> None:
    daemon = running_since_a_backup()
    put = ms.PutBack(ORDERS_KEY, orders(JOB), "", over_revision=40)
    assert daemon.take(changed(ORDERS_KEY, orders(), 40)) == (put,)
    assert not of(ms.ActOnUnit, daemon.take(DRAINED)) and daemon.unit_state() is UnitState.RUNNING
    daemon.take(ms.NotDone("putting it back failed: etcd is away"))
    daemon.now_s += TRY_AGAIN_S
    assert of(ms.PutBack, daemon.take(DRAINED)) == [put]
    assert daemon.said(ms.StandsAgain(put, True)) == [
        f"etcd held an earlier {ORDERS_KEY}; it is put back as this node remembers it"
    ]
    assert not of(ms.ActOnUnit, daemon.take(DRAINED))


def test_the_answer_to_an_earlier_attempt_ends_no_later_one() -> None:
    daemon = running_since_a_backup()
    [first] = of(ms.PutBack, daemon.take(changed(ORDERS_KEY, orders(), 40)))
    [second] = of(ms.PutBack, daemon.take(changed(ORDERS_KEY, orders("other"), 41)))
    assert isinstance(first, ms.PutBack) and isinstance(second, ms.PutBack)
    daemon.take(ms.StandsAgain(first, False))
    daemon.take(ms.NotDone("putting it back failed: etcd is away"))
    daemon.now_s += TRY_AGAIN_S
    assert of(ms.PutBack, daemon.take(DRAINED)) == [second]
    daemon.take(ms.StandsAgain(second, True))
    assert not daemon.state.to_put_back


def test_what_a_scheduler_decides_after_the_orders_are_put_back_is_followed() -> None:
    daemon = running_since_a_backup()
    for written in (orders(), orders("other")):
        # the scheduler of the set-back etcd did not know of the job
        assert of(ms.PutBack, daemon.take(changed(ORDERS_KEY, written, 41)))
    assert daemon.take(changed(ORDERS_KEY, orders(JOB), 42)) == (), "put back"
    daemon.take(changed(ORDERS_KEY, orders(), 43))
    assert of(ms.ActOnUnit, daemon.take(DRAINED)) == [ms.ActOnUnit(JOB, ms.UnitAct.ASK_TO_LEAVE)]


def test_orders_of_a_backup_end_nothing_on_a_node_that_was_out_of_touch() -> None:
    daemon = running_since_a_backup()
    daemon.may_put_back = False
    [said] = daemon.said(changed(ORDERS_KEY, orders(), 40))
    assert said == (
        f"{ORDERS_KEY} is as it was earlier; this node was out of touch for so long that it does not put it back"
    )
    assert not of(ms.ActOnUnit, daemon.take(DRAINED)) and daemon.state.orders is None


def scaled(changes: int, **fields: object) -> bytes:
    return submission(JOB, nonce=NONCE, changes=changes, **fields)


def test_a_submission_of_a_backup_is_written_over_by_the_later_one() -> None:
    stopped = scaled(2, wanted=pb.Submission.STOP)
    daemon = Daemon(changed(SUBMISSION_KEY, scaled(1)), changed(SUBMISSION_KEY, stopped, 100))
    assert daemon.take(changed(SUBMISSION_KEY, scaled(1), 40)) == (
        ms.PutBack(SUBMISSION_KEY, stopped, NONCE, over_revision=40),
    )
    assert daemon.state.submissions[JOB].wanted == pb.Submission.STOP
    daemon.take(changed(SUBMISSION_KEY, scaled(3), 41))
    assert daemon.state.submissions[JOB].changes == 3, "a command of after the set-back"


def test_a_removed_submission_of_a_backup_does_not_end_the_next_one_of_its_name() -> None:
    """The removal is gone too, and that arrives first."""
    second = submission(JOB, nonce="nonce-2")
    daemon = Daemon(SUBMITTED, REMOVED, changed(SUBMISSION_KEY, second, 100), ORDERED, DRAINED)
    daemon.take(changed(REMOVAL_KEY, None))
    assert of(ms.PutBack, daemon.take(changed(SUBMISSION_KEY, submission(JOB, nonce=NONCE), 40))) == [
        ms.PutBack(SUBMISSION_KEY, second, "nonce-2", over_revision=40)
    ]
    assert not of(ms.ActOnUnit, daemon.take(DRAINED)) and daemon.unit_state() is UnitState.RUNNING


def test_the_nodes_own_key_is_checked_when_it_is_gone() -> None:
    actions = Daemon().take(changed(cluster_keys.node(NODE), None))
    assert actions[1:] == (ms.RecheckNodeKey(),)
    assert Daemon().take(changed(cluster_keys.node(NODE), b"own")) == ()


@pytest.mark.parametrize("key", [SUBMISSION_KEY, ORDERS_KEY, REMOVAL_KEY, cluster_keys.SUBMISSIONS + "a/b"])
def test_a_record_that_can_not_be_read_changes_nothing(key: str) -> None:
    with pytest.raises(UnreadableRecord):
        running().take(changed(key, b"\xff"))
