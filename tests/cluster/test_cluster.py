"""Jobs submitted to a cluster: they start, share nodes, outlive daemons, and end; every sample of each once."""

from __future__ import annotations

from bagua_agent import cluster_requests
from tests.cluster.cluster import DEADLINE_S
from tests.cluster.conftest import MakeCluster
from tests.lab.wait import eventually


def test_a_second_job_takes_what_the_first_can_spare_and_gives_it_back(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(3)
    first = cluster.submit("first", (1, 3))
    wide = first.await_world(3)
    second = cluster.submit("second", (1, 1), samples=4000)
    second.await_world(1)
    narrow = first.await_world(2, after_step=wide)
    assert len(first.nodes) == 2 and len(second.nodes) == 1
    second.hurry()
    ended = second.await_outcome()
    assert (ended.outcome, ended.exit_code) == ("succeeded", 0)
    first.await_world(3, after_step=narrow)
    first.hurry()
    assert first.await_outcome().exit_code == 0
    first.check()
    second.check()
    cluster.await_idle()


def test_daemons_are_killed_under_a_job_and_one_is_the_scheduler(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(2)
    job = cluster.submit("job", (2, 2))
    job.await_world(2)
    for daemon in cluster.daemons:
        before = job.step
        daemon.kill()
        daemon.start()
        daemon.await_line("job job runs here already, in slots 0")
        job.await_world(2, after_step=before + 1)
    eventually(cluster.scheduler, DEADLINE_S, lambda: f"somebody schedules\n{cluster.logs()}")
    generations = {line.generation for line in job.ledger.lines}
    assert len(generations) == 1, "membership never noticed"
    job.hurry()
    assert job.await_outcome().exit_code == 0
    job.check()
    cluster.await_idle()


def test_a_job_is_scaled_and_stopped(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(3)
    job = cluster.submit("job", (1, 1))
    one = job.await_world(1)
    assert cluster_requests.scale_submitted(cluster.store, "job", 2, 3) == (1, 1)
    three = job.await_world(3, after_step=one)
    cluster_requests.scale_submitted(cluster.store, "job", 2, 2)
    job.await_world(2, after_step=three)
    cluster_requests.stop(cluster.store, "job")
    ended = job.await_outcome()
    assert ended.outcome == "stopped"
    cluster.await_idle()
