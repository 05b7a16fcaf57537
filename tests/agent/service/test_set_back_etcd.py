"""etcd is set back to a backup while a daemon and its scheduler live: no unit ends, and later writes come back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bagua_agent.cluster.cluster_policy import ClusterPolicy
from bagua_agent.cluster.cluster_records import parse_submission
from bagua_agent.cluster_client import cluster_requests
from bagua_agent.cluster_state.cluster_picture import ClusterPicture
from bagua_agent.etcd import cluster_keys
from bagua_agent.etcd.client import Store
from bagua_agent.etcd.leased_keys import LeasedKeys
from bagua_agent.etcd.mirror import Change
from bagua_agent.service.scheduling.scheduler import Scheduler
from bagua_contract import cluster_pb2 as pb
from tests.agent.cluster_state.test_odd_records import orders, runs_good, submission
from tests.agent.etcd.conftest import Server
from tests.agent.etcd.test_mirror import MakeStore
from tests.agent.service.daemon_here import LEASE_S, NODE, running_daemon
from tests.agent.service.test_job_retention import ordered, submit
from tests.agent.service.test_removed_jobs import Units, await_line
from tests.lab.wait import HANG_S, eventually


@contextmanager
def scheduling(store: Store) -> Iterator[list[str]]:
    """What it says, while it schedules. It settles, so that the daemon has time to put back what it remembers."""
    said: list[str] = []
    leased = LeasedKeys(store, LEASE_S)
    scheduler = Scheduler(store, leased, NODE, said.append, ClusterPolicy(settle_s=1.0))
    scheduler.start()
    try:
        yield said
    finally:
        scheduler.stop()
        leased.close()


def test_a_picture_tells_that_etcd_was_set_back() -> None:
    """Not of a gap in its history: removals have the revision of the read, and writes come after them."""
    picture = ClusterPicture(0.0, print)
    picture.take([Change("/a", b"", 20, 20), Change("/b", b"", 90, 30)], 0.0)
    picture.take([Change("/a", None, 150, 20), Change("/c", b"", 110, 110)], 1.0)
    assert not picture.was_set_back
    picture.take([Change("/b", b"", 30, 30)], 2.0)
    assert picture.was_set_back


def most_nodes(store: Store) -> int:
    """That the job which waits may have."""
    found = store.get(cluster_keys.submission("waits"))
    return 0 if found is None else parse_submission(found.value, "waits").max_nodes


def test_units_that_were_started_since_the_backup_go_on(
    tcp_server: Server, make_store: MakeStore, tmp_path: Path
) -> None:
    store, units = make_store(tcp_server.endpoint), Units()
    store.put(cluster_keys.orders(NODE), orders())
    with running_daemon(tcp_server, store, tmp_path, units=units) as said, scheduling(store) as decided:
        await_line(decided, "this node schedules")
        waits = submission("waits", min_nodes=2, max_nodes=2)
        cluster_requests.submit(store, pb.Submission.FromString(waits))
        tcp_server.kill()
        tcp_server.back_up()
        tcp_server.restart()
        cluster_requests.scale_submitted(store, "waits", 2, 3)
        submit(store, "good")
        eventually(lambda: runs_good(store), HANG_S, lambda: f"it runs; {said}; {decided}")
        tcp_server.kill()
        tcp_server.restart(set_back=True)
        await_line(decided, "etcd was set back to an earlier state")
        await_line(said, "etcd held an earlier /bagua/v1/cluster/orders/n0; it is put back")
        eventually(lambda: most_nodes(store) == 3, HANG_S, lambda: f"it is scaled again; {said}")
        again = "this node schedules the cluster's jobs"
        eventually(lambda: decided.count(again) == 2, HANG_S, lambda: f"it schedules again; {decided}")
        eventually(lambda: ordered(store) == ["good"], HANG_S, lambda: f"{said}; {decided}")
        eventually(lambda: runs_good(store), HANG_S, lambda: f"its node says so again; {said}")
    assert units.asked == [], said
