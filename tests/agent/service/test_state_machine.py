"""What a daemon does after each event, decided without IO, in usual and in odd orders of events."""

from __future__ import annotations

import copy

import pytest

from bagua_agent.cluster.cluster_policy import ClusterPolicy
from bagua_agent.cluster.cluster_records import write_removal
from bagua_agent.cluster.cluster_view import RemovalView, UnitState
from bagua_agent.etcd import cluster_keys
from bagua_agent.etcd.mirror import Change
from bagua_agent.service.state_machine import messages as ms
from bagua_agent.service.state_machine.machine import (
    ACT_AGAIN_S,
    LOOK_AGAIN_S,
    LOOK_ENDS_S,
    LOOK_EVERY_S,
    LOOK_HANGS,
    LOOK_SOON_S,
    TRY_AGAIN_S,
    step,
)
from bagua_agent.service.state_machine.state import Now, State
from bagua_agent.service.units.units import FoundUnit, UnitNote
from bagua_contract import cluster_pb2 as pb
from tests.agent.cluster_state.test_odd_records import orders, submission

NODE, JOB, NONCE = "n0", "demo", "nonce-1"
UNIX_S = 1e9
EMPTY = State(NODE, 2, ClusterPolicy())
SUBMISSION_KEY, ORDERS_KEY = cluster_keys.submission(JOB), cluster_keys.orders(NODE)
OUTCOME_KEY, REMOVAL_KEY = cluster_keys.outcome(JOB), cluster_keys.removal(NONCE)
OUTCOME = pb.JobOutcome(exit_code=1).SerializeToString()


def changed(key: str, value: bytes | None, mod_revision: int = 2) -> ms.RecordChanged:
    return ms.RecordChanged(Change(key, value, mod_revision, 1))


SUBMITTED = changed(SUBMISSION_KEY, submission(JOB, nonce=NONCE))
STOPPED = changed(SUBMISSION_KEY, submission(JOB, nonce=NONCE, wanted=pb.Submission.STOP))
ORDERED = changed(ORDERS_KEY, orders(JOB))
ENDED = changed(OUTCOME_KEY, OUTCOME)
REMOVED = changed(REMOVAL_KEY, write_removal(RemovalView(JOB, UNIX_S)))
LIVES, EXITED = FoundUnit(JOB, 77, None), FoundUnit(JOB, 77, 3)
DRAINED = ms.InboxDrained()


class Daemon:
    """The machine, one event at a time; checks that a step changes nothing in the state before it."""

    def __init__(self, *events: ms.Event) -> None:
        self.state, self.now_s, self.may_put_back, self.in_touch = EMPTY, 100.0, True, True
        for event in events:
            self.take(event)

    def take(self, event: ms.Event) -> tuple[ms.Action, ...]:
        before, kept = self.state, copy.deepcopy(self.state)
        now = Now(self.now_s, UNIX_S, self.may_put_back, self.in_touch)
        self.state, actions = step(before, event, now)
        assert before == kept, event
        return actions

    def said(self, event: ms.Event) -> list[str]:
        return [action.line for action in self.take(event) if isinstance(action, ms.Say)]

    def unit_state(self) -> UnitState:
        [report] = [action for action in self.take(DRAINED) if isinstance(action, ms.Report)]
        [unit] = report.units
        return unit.state


def running() -> Daemon:
    started = ms.Started(JOB, 5.0)
    return Daemon(SUBMITTED, ORDERED, DRAINED, started, ms.UnitsSeen((LIVES,)), DRAINED)


def of(kind: type, actions: tuple[ms.Action, ...]) -> list[ms.Action]:
    return [action for action in actions if isinstance(action, kind)]


def test_a_job_that_is_ordered_starts_once_its_submission_is_known() -> None:
    daemon = Daemon(ORDERED)
    assert not of(ms.StartUnit, daemon.take(DRAINED)) and daemon.unit_state() is UnitState.WAITING
    daemon.take(SUBMITTED)
    [start] = of(ms.StartUnit, daemon.take(DRAINED))
    assert isinstance(start, ms.StartUnit) and (start.slots, start.order, start.failures) == ((0,), 1, 0)
    assert not of(ms.StartUnit, daemon.take(DRAINED)), "once"
    assert daemon.unit_state() is UnitState.RUNNING


def test_looks_at_a_unit_that_is_starting_end_nothing() -> None:
    daemon = Daemon(SUBMITTED, ORDERED, DRAINED, ms.UnitsSeen(()))
    assert daemon.state.units[JOB].alive
    assert daemon.take(ms.Started(JOB, 5.0)) == (ms.LookForUnits(),)
    daemon.take(ms.UnitsSeen(()))
    assert not daemon.state.units[JOB].alive and daemon.state.units[JOB].exit_code == 137


@pytest.mark.parametrize(
    "event",
    [
        ms.Started(JOB, 5.0),
        ms.ProcessEnded(JOB),
        ms.WatchFailed(JOB, 77, "no descriptor"),
        ms.UnitsSeen((LIVES,), {JOB: "an error"}),
        ms.UnitsSeen((EXITED,)),
        ms.StandsAgain(ms.PutBack(SUBMISSION_KEY, b"", NONCE), False),
        changed(SUBMISSION_KEY, None),
        changed(OUTCOME_KEY, None),
        changed(ORDERS_KEY, None),
        changed(REMOVAL_KEY, None),
        DRAINED,
    ],
    ids=str,
)
def test_news_of_a_job_that_is_not_known_changes_nothing_of_it(event: ms.Event) -> None:
    daemon = Daemon(event)
    assert not daemon.state.units and not daemon.state.submissions and not daemon.state.to_put_back


def test_an_end_is_said_with_its_reason_and_told_among_the_jobs_events() -> None:
    daemon = running()
    daemon.now_s += 1.0
    assert daemon.take(ms.UnitsSeen((EXITED,), {JOB: "no such\nscript"})) == (
        ms.Say(f"job {JOB}: its agent ended with 3: no such\\nscript"),
        ms.ActOnUnit(JOB, ms.UnitAct.FORGET),
        ms.TellFailure(daemon.state.submissions[JOB], 1, "its agent ended with 3: no such\\nscript"),
    )
    assert daemon.take(ms.UnitsSeen((EXITED,))) == (), "once"
    assert not daemon.state.units[JOB].slots


@pytest.mark.parametrize("late", [ms.ProcessEnded(JOB), ms.Started(JOB, 9.0), ms.WatchFailed(JOB, 77, "x")])
def test_news_after_the_end_of_a_unit_does_not_revive_it(late: ms.Event) -> None:
    daemon = running()
    daemon.take(ms.UnitsSeen((EXITED,)))
    daemon.take(late)
    assert not daemon.state.units[JOB].alive


def test_a_process_that_has_ended_is_not_watched_again_but_looked_for_soon() -> None:
    daemon = running()
    assert daemon.state.units[JOB].watched_pid == 77
    assert daemon.take(ms.ProcessEnded(JOB)) == (ms.LookForUnits(),)
    assert daemon.take(ms.UnitsSeen((LIVES,))) == ()
    assert daemon.state.wake_at_s == daemon.now_s + LOOK_SOON_S
    assert daemon.take(ms.UnitsSeen((FoundUnit(JOB, 78, None),))) == (ms.WatchProcess(JOB, 78),)


def test_a_process_that_could_not_be_watched_is_tried_again() -> None:
    daemon = running()
    assert daemon.said(ms.WatchFailed(JOB, 77, "no descriptor")) == [
        f"job {JOB}: its process 77 can't be watched yet: no descriptor"
    ]
    daemon.now_s += TRY_AGAIN_S
    assert of(ms.LookForUnits, daemon.take(DRAINED))
    assert daemon.take(ms.UnitsSeen((LIVES,))) == (ms.WatchProcess(JOB, 77),)


def test_a_refusal_is_reported_and_not_tried_again() -> None:
    daemon = Daemon(SUBMITTED, ORDERED, DRAINED)
    [said, told] = daemon.take(ms.StartRefused(JOB, "user 'x' does not exist"))
    assert said == ms.Say(f"job {JOB} is refused here: user 'x' does not exist")
    assert isinstance(told, ms.TellFailure) and told.failures == 0
    assert not of(ms.StartUnit, daemon.take(DRAINED)) and daemon.unit_state() is UnitState.REFUSED


def test_a_start_that_failed_names_its_trouble_as_the_reason_of_the_end() -> None:
    daemon = Daemon(SUBMITTED, ORDERED, DRAINED)
    daemon.take(ms.Started(JOB, None, "systemd did not start it"))
    assert daemon.said(ms.UnitsSeen(())) == [f"job {JOB}: systemd did not start it"]
    restarted = Daemon(SUBMITTED, ORDERED, DRAINED, ms.Started(JOB, None, "systemd did not start it"))
    restarted.take(ms.UnitsSeen((LIVES,)))
    assert restarted.state.units[JOB].reason == "", "it was started after all"


@pytest.mark.parametrize("why", [STOPPED, changed(ORDERS_KEY, orders(), 3)])
def test_a_unit_is_asked_to_leave_once_and_then_killed(why: ms.Event) -> None:
    daemon = running()
    daemon.take(why)
    assert of(ms.ActOnUnit, daemon.take(DRAINED)) == [ms.ActOnUnit(JOB, ms.UnitAct.ASK_TO_LEAVE)]
    assert not of(ms.ActOnUnit, daemon.take(DRAINED))
    assert daemon.state.again_s is not None
    daemon.now_s = daemon.state.again_s
    assert of(ms.ActOnUnit, daemon.take(DRAINED)) == [ms.ActOnUnit(JOB, ms.UnitAct.KILL)]
    assert not of(ms.ActOnUnit, daemon.take(DRAINED))


def failed(act: ms.UnitAct, *, may_be_done: bool = False) -> ms.ActFailed:
    return ms.ActFailed(JOB, act, f"job {JOB}: systemd is away", may_be_done)


def acts_after(daemon: Daemon, event: ms.ActFailed) -> list[ms.Action]:
    """On units: at once, and once the time to try again has come."""
    assert daemon.said(event) == [event.reason]
    at_once = of(ms.ActOnUnit, daemon.take(DRAINED))
    daemon.now_s += ACT_AGAIN_S
    return at_once + of(ms.ActOnUnit, daemon.take(DRAINED)) + of(ms.ActOnUnit, daemon.take(DRAINED))


def test_a_request_to_leave_or_a_kill_that_failed_is_repeated() -> None:
    daemon = running()
    daemon.take(STOPPED)
    asked = of(ms.ActOnUnit, daemon.take(DRAINED))
    kill_at_s = daemon.state.again_s
    assert kill_at_s is not None
    assert acts_after(daemon, failed(ms.UnitAct.ASK_TO_LEAVE)) == asked
    assert daemon.unit_state() is UnitState.LEAVING
    assert acts_after(daemon, failed(ms.UnitAct.ASK_TO_LEAVE, may_be_done=True)) == [], "it may have come"
    daemon.now_s = kill_at_s  # the time since the first request counts
    killed = of(ms.ActOnUnit, daemon.take(DRAINED))
    assert killed == [ms.ActOnUnit(JOB, ms.UnitAct.KILL)]
    for may_be_done in (False, True, False):
        assert acts_after(daemon, failed(ms.UnitAct.KILL, may_be_done=may_be_done)) == killed
    daemon.take(ms.UnitsSeen((EXITED,)))
    assert acts_after(daemon, failed(ms.UnitAct.KILL)) == [], "it has ended"


def test_a_failed_act_on_a_unit_that_is_not_known_is_only_said() -> None:
    daemon = Daemon()
    assert acts_after(daemon, failed(ms.UnitAct.KILL)) == []


def test_a_unit_that_an_earlier_daemon_asked_to_leave_is_not_asked_again() -> None:
    kept = ms.UnitKept(LIVES, UnitNote(1, (1,), 2, 5.0, NONCE), was_asked=True)
    daemon = Daemon()
    assert daemon.take(kept) == (
        ms.Say(f"job {JOB} runs here already, in slots 1"),
        ms.WatchProcess(JOB, 77),
    )
    daemon.take(changed(ORDERS_KEY, orders()))
    assert not of(ms.ActOnUnit, daemon.take(DRAINED)) and daemon.unit_state() is UnitState.LEAVING
    assert daemon.take(ms.UnitsSeen((EXITED,)))[1:] == (ms.ActOnUnit(JOB, ms.UnitAct.FORGET),)
    assert daemon.state.units[JOB].failures == 2, "its end was asked for"


def test_the_failure_of_a_unit_that_ended_without_a_daemon_is_counted_and_told() -> None:
    kept = ms.UnitKept(EXITED, UnitNote(1, (1,), 2, 5.0, NONCE), was_asked=False)
    daemon = Daemon(kept, DRAINED, SUBMITTED, ORDERED)
    actions = daemon.take(ms.UnitsSeen((EXITED,), {JOB: "no such file"}))
    reason = "its agent ended with 3: no such file"
    assert of(ms.TellFailure, actions) == [ms.TellFailure(daemon.state.submissions[JOB], 3, reason)]
    assert ms.ActOnUnit(JOB, ms.UnitAct.FORGET) in actions
    assert not daemon.state.units[JOB].alive and not of(ms.StartUnit, daemon.take(DRAINED))
    [report] = of(ms.Report, daemon.take(DRAINED))
    assert isinstance(report, ms.Report) and report.units[0].failures == 3


@pytest.mark.parametrize(
    ("ran_s", "failures"),
    [(36000.0, 1), (1.0, 3), (-36000.0, 3)],
    ids=["long", "short", "the clock was set back"],
)
def test_the_time_that_a_unit_ran_under_an_earlier_daemon_counts(ran_s: float, failures: int) -> None:
    note = UnitNote(1, (1,), 2, 5.0, NONCE, started_unix_s=UNIX_S - ran_s)
    daemon = Daemon(ms.UnitKept(LIVES, note, was_asked=False), DRAINED, SUBMITTED, ORDERED)
    daemon.take(ms.UnitsSeen((EXITED,)))
    assert daemon.state.units[JOB].failures == failures


def test_the_end_of_a_unit_that_was_asked_to_leave_is_no_failure_without_a_daemon() -> None:
    kept = ms.UnitKept(EXITED, UnitNote(1, (1,), 2, 5.0, NONCE), was_asked=True)
    daemon = Daemon(kept, DRAINED, SUBMITTED, ORDERED)
    assert not of(ms.TellFailure, daemon.take(ms.UnitsSeen((EXITED,))))
    assert daemon.state.units[JOB].failures == 2


def test_logs_are_tidied_long_after_the_start_and_again_and_again() -> None:
    """At the start not all records may be known yet."""
    daemon = running()
    daemon.take(changed(cluster_keys.outcome("ended"), pb.JobOutcome(nonce="nonce-2").SerializeToString()))
    daemon.take(changed(cluster_keys.outcome("old"), OUTCOME))
    for _ in range(2):
        assert not of(ms.TidyLogs, daemon.take(DRAINED))
        daemon.now_s += daemon.state.policy.logs_tidied_every_s
        [tidy] = of(ms.TidyLogs, daemon.take(DRAINED))
        assert tidy == ms.TidyLogs(frozenset([(JOB, NONCE), ("ended", "nonce-2"), ("old", "")]))
    daemon.in_touch = False
    daemon.now_s += daemon.state.policy.logs_tidied_every_s
    assert not of(ms.TidyLogs, daemon.take(DRAINED)), "what is known may have been removed"
    assert daemon.state.wake_at_s > daemon.now_s


# -- the node


def test_two_looks_agree_before_the_node_is_in_trouble() -> None:
    daemon = Daemon()
    full = ms.NodeSeen(("the disk is full",))
    assert of(ms.LookAtNode, daemon.take(DRAINED))
    told: list[tuple[ms.Event, list[str]]] = [
        (ms.NodeSeen(()), []),
        (full, []),
        (ms.NodeSeen(()), []),
        (full, []),
    ]
    for event, lines in told:
        assert daemon.said(event) == lines
    assert daemon.state.looks_at_s == daemon.now_s + LOOK_AGAIN_S
    assert daemon.said(full) == ["in trouble: the disk is full"]
    assert daemon.state.looks_at_s == daemon.now_s + LOOK_EVERY_S
    daemon.take(ms.Noted("port 1 is taken"))
    [report] = of(ms.Report, daemon.take(DRAINED))
    assert report == ms.Report(
        (), ("the disk is full",), "port 1 is taken", "0 jobs in 0 of 2 slots; the disk is full"
    )
    daemon.take(ms.NodeSeen(()))
    assert daemon.said(ms.NodeSeen(())) == ["in trouble no more"]


@pytest.mark.parametrize("end", [ms.NodeSeen(()), ms.LookFailed("no thread")], ids=str)
def test_a_look_that_hangs_is_a_trouble_until_it_ends(end: ms.Event) -> None:
    daemon = Daemon()
    actions = daemon.take(DRAINED)
    looks = len(of(ms.LookAtNode, actions))
    began_s, told = daemon.now_s, [False]
    while daemon.now_s < began_s + 3 * LOOK_ENDS_S:
        daemon.now_s = daemon.state.wake_at_s
        actions = daemon.take(DRAINED)
        looks += len(of(ms.LookAtNode, actions))
        [report] = of(ms.Report, actions)
        assert isinstance(report, ms.Report)
        told.append(report.troubles == (LOOK_HANGS,))
        assert told[-1] == (daemon.now_s >= began_s + LOOK_ENDS_S)
        assert [a for a in actions if isinstance(a, ms.Say)] == (
            [ms.Say(f"in trouble: {LOOK_HANGS}")] if told[-2:] == [False, True] else []
        )
    assert looks == 1, "a further one would hang too"
    assert "the look at the node that hung has ended" in daemon.said(end)
    daemon.now_s = daemon.state.looks_at_s
    actions = daemon.take(DRAINED)
    assert of(ms.LookAtNode, actions), "it is looked at again"
    [report] = of(ms.Report, actions)
    assert isinstance(report, ms.Report) and report.troubles == ()
