"""Daemons of two versions whose records differ: each passes over the other's with one line, and jobs go on."""

from __future__ import annotations

from pathlib import Path

import pytest

from bagua_agent.cluster.cluster_records import PROTOCOL
from bagua_agent.etcd import cluster_keys
from tests.cluster.cluster import DEADLINE_S, POLL_S, Daemon
from tests.cluster.conftest import MakeCluster
from tests.lab.wait import eventually
from tests.lab.zygote import REAL_START_VARIABLE

NEXT = PROTOCOL + 1


def test_a_newer_daemon_gets_no_job_and_ends_none(
    make_cluster: MakeCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    newer_version = tmp_path / "next-version"
    newer_version.mkdir()
    lines = f"import bagua_agent.cluster.cluster_records as records\nrecords.PROTOCOL = {NEXT}\n"
    (newer_version / "sitecustomize.py").write_text(lines)

    def lines_of(daemon: Daemon, key: str, what: str) -> int:
        other, own = (PROTOCOL, NEXT) if daemon is newer else (NEXT, PROTOCOL)
        why = f"{key}: a {what} of protocol {other}, this is {own}; use one version of bagua"
        return sum(why in line for line in daemon.log.read_text().splitlines())

    def await_scheduler(daemon: Daemon) -> None:
        eventually(
            lambda: cluster.scheduler() == daemon.name,
            DEADLINE_S,
            lambda: f"scheduler\n{cluster.logs()}",
            POLL_S,
        )

    cluster = make_cluster(2, node_lease_s=10.0)  # a lapse would be another start of scheduling
    eventually(cluster.scheduler, DEADLINE_S, cluster.logs, POLL_S)
    older = cluster.daemon(cluster.scheduler())
    newer = next(daemon for daemon in cluster.daemons if daemon is not older)
    newer.stop()
    with monkeypatch.context() as starting:
        starting.setenv(REAL_START_VARIABLE, "1")  # the zygote's processes are of this version
        newer.start(first_path=str(newer_version))
    of_node = (older, cluster_keys.node(newer.name), "node")
    eventually(lambda: lines_of(*of_node), DEADLINE_S, cluster.logs, POLL_S)
    job = cluster.submit("job", (1, 2))
    job.await_world(1)
    assert job.nodes == [older.name]

    older.kill()
    await_scheduler(newer)
    of_job = (newer, cluster_keys.submission("job"), "submission")
    eventually(lambda: lines_of(*of_job) == 2, DEADLINE_S, cluster.logs, POLL_S)  # as daemon and as scheduler
    older.start()
    older.await_line("job job runs here already, in slots 0")
    job.await_world(1)
    assert job.nodes == [older.name]

    newer.stop()
    await_scheduler(older)
    job.hurry()
    assert job.await_outcome().exit_code == 0
    job.check()
    assert {line.world_size for line in job.ledger.lines} == {1}
    assert len({line.generation for line in job.ledger.lines}) == 1, "membership never noticed"
    assert (lines_of(*of_node), lines_of(*of_job)) == (1, 2)
    cluster.await_idle()
