"""The account of the queue: jobs by state, waits once, outcomes, and nothing while this daemon does not schedule."""

from __future__ import annotations

from dataclasses import replace

from bagua_agent.cluster.cluster_view import DrainView, JobEnd
from bagua_agent.metrics.daemon_picture import WAIT_BOUNDS_S
from bagua_agent.service.scheduling.queue_account import QueueAccount
from tests.agent.cluster.cluster_pictures import job, node, picture, planned

NOW_S = 5000.0


def test_a_wait_counts_once_when_the_job_is_given_its_nodes() -> None:
    account = QueueAccount()
    assert account.picture(NOW_S) is None
    account.begin()
    jobs = (job("run"), job("next", submitted_unix_s=NOW_S - 100))
    full = picture([node("a")], *jobs, orders={"a": "run:4:1"}, running="run")
    account.decided(full, planned(full), NOW_S)
    found = account.picture(NOW_S)
    assert found is not None
    assert (found.jobs["queued"], found.jobs["running"], found.oldest_wait_s) == (1, 1, 100.0)
    assert sum(found.waits) == 0 and found.slots == {
        "used": 4,
        "free": 0,
        "drained": 0,
        "trouble": 0,
        "absent": 0,
    }

    free = picture([node("a"), node("b", drain=DrainView()), node("c", present=False)], jobs[1])
    for _ in range(2):
        account.decided(free, planned(free), NOW_S + 50)
    account.ended(JobEnd.SUCCEEDED)
    found = account.picture(NOW_S + 60)
    assert found is not None
    assert (found.jobs["queued"], found.jobs["starting"], found.oldest_wait_s) == (0, 1, 0.0)
    assert sum(found.waits) == 1 and found.wait_sum_s == 150.0
    assert found.waits[WAIT_BOUNDS_S.index(300.0)] == 1
    assert found.nodes == {"ready": 1, "trouble": 0, "drained": 1, "absent": 1}
    assert found.ended == {"succeeded": 1, "failed": 0, "stopped": 0}
    account.begin()
    assert account.picture(NOW_S) is None, "another daemon schedules"


def test_a_job_that_ran_before_the_election_counts_no_wait() -> None:
    account = QueueAccount()
    account.begin()
    view = picture([node("a")], job("run"), orders={"a": "run:4:1"}, running="run")
    account.decided(view, planned(view), NOW_S)
    at_once = replace(view, submissions=(*view.submissions, job("quick", submitted_unix_s=NOW_S)))
    at_once = replace(at_once, nodes={**view.nodes, "b": node("b")})
    account.decided(at_once, planned(at_once), NOW_S + 0.5)
    found = account.picture(NOW_S)
    assert found is not None and found.waits[0] == 1 and sum(found.waits) == 1


def test_a_job_that_loses_its_nodes_waits_from_then_on_and_not_since_it_was_submitted() -> None:
    """A job that trained for weeks would page people for a wait of weeks."""
    begun_s = NOW_S - 1e6
    away, back = picture([], job("old", submitted_unix_s=begun_s)), picture([node("a")], job("old"))
    runs = picture([node("a")], away.submissions[0], orders={"a": "old:4:1"}, running="old")
    away = replace(away, progress=runs.progress)
    for seen_before in (True, False):
        account = QueueAccount()
        account.begin()
        if seen_before:
            account.decided(runs, planned(runs), NOW_S)
        for later_s in (10.0, 20.0):
            account.decided(away, planned(away), NOW_S + later_s)
        found = account.picture(NOW_S + 25)
        assert found is not None and (found.jobs["queued"], found.oldest_wait_s) == (1, 15.0)
        back = replace(back, submissions=away.submissions, progress=runs.progress)
        account.decided(back, planned(back), NOW_S + 30)
        found = account.picture(NOW_S + 30)
        assert found is not None and (found.wait_sum_s, found.oldest_wait_s) == (20.0, 0.0)


def test_another_job_of_the_name_waits_since_its_own_submission() -> None:
    account = QueueAccount()
    account.begin()
    for submitted_s in (NOW_S - 500, NOW_S - 50):
        view = picture([], job("one", submitted_unix_s=submitted_s))
        account.decided(view, planned(view), NOW_S)
    found = account.picture(NOW_S)
    assert found is not None and found.oldest_wait_s == 50.0
