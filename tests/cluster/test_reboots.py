"""A machine is rebooted whose daemon schedules, with etcd's leader beside it: the others go on, and have it back."""

from __future__ import annotations

import threading

import pytest

from bagua_agent.cluster_client import cluster_requests
from tests.cluster.cluster import DEADLINE_S, Cluster, SubmittedJob
from tests.cluster.conftest import MakeCluster
from tests.lab.wait import eventually


@pytest.mark.parametrize("reboots", [2, pytest.param(20, marks=pytest.mark.long)])
def test_the_scheduler_goes_down_with_etcds_leader(make_cluster: MakeCluster, reboots: int) -> None:
    cluster = make_cluster(3, etcd_beside=True)
    for number in range(reboots):
        before = eventually(cluster.scheduler, DEADLINE_S, lambda: f"a daemon schedules\n{cluster.logs()}")
        daemon = cluster.daemon(before)
        member = next(m for m in cluster.etcd.members if m.host is daemon.host)
        cluster.etcd.let_lead(member)
        # as systemd stops them: side by side
        stops = [threading.Thread(target=stop) for stop in (daemon.stop, member.stop)]
        for stop in stops:
            stop.start()
        for stop in stops:
            stop.join()
        assert not daemon.process.is_running and not member.process.is_running  # type: ignore[union-attr]
        another = eventually(
            lambda b=before: _is_another(cluster, b),  # type: ignore[misc]
            DEADLINE_S,
            lambda: f"another one schedules\n{cluster.logs()}",
        )
        member.start()
        daemon.start()
        job = cluster.submit(f"job-{number}", (1, 3))
        eventually(
            lambda j=job: len(j.nodes) == 3,  # type: ignore[misc]
            DEADLINE_S,
            lambda a=another: f"{a} has all three\n{cluster.nodes()}\n{cluster.logs()}",  # type: ignore[misc]
        )
        _end(cluster, job)
        member.await_healthy()


def _is_another(cluster: Cluster, before: str) -> str:
    scheduler = cluster.scheduler()
    return "" if scheduler == before else scheduler


def _end(cluster: Cluster, job: SubmittedJob) -> None:
    job.hurry()
    cluster_requests.stop(cluster.store, job.job_id)
    job.await_outcome()
    cluster.await_idle()
