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
