"""A daemon whose port is taken while it restarts follows its orders, says so, and serves logs once the port is free."""

from __future__ import annotations

import sys

from bagua_agent.observation.cluster_status import NodeStatus, cluster_status
from bagua_agent.service.config.agent_config_keys import KEYS
from tests.cluster.cluster import DEADLINE_S, Cluster
from tests.cluster.conftest import MakeCluster
from tests.lab.wait import eventually

PORT = next(key.default for key in KEYS if key.field == "listen_port")
TAKER = """
import signal, socket
taken = socket.socket()
taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)  # as root, which the daemon is too: it would share the port
taken.bind(("", {port}))
taken.listen()
print("taken", flush=True)
signal.pause()
"""


def status(cluster: Cluster) -> NodeStatus:
    (node,) = cluster_status(cluster.store, complain=print).nodes
    return node


def test_a_daemon_whose_port_is_taken_follows_its_orders_and_says_so(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(1)
    (daemon,) = cluster.daemons
    assert (status(cluster).state, status(cluster).reason) == ("ready", "")
    daemon.kill()
    said = cluster.directory / "taker.log"
    taker = daemon.host.run([sys.executable, "-c", TAKER.format(port=PORT)], env={}, output=said)
    eventually(lambda: "taken" in said.read_text(), DEADLINE_S, "the port is taken")
    daemon.start()
    job = cluster.submit("job", (1, 1))
    job.await_world(1)
    daemon.await_line(f"{PORT} can't be listened at", "tried again")
    eventually(
        lambda: status(cluster).state == "ready" and f"{PORT} can't be listened at" in status(cluster).reason,
        DEADLINE_S,
        lambda: f"the node's status says so: {status(cluster)}",
    )
    taker.kill()
    daemon.await_line("logs are served")
    eventually(lambda: not status(cluster).reason, DEADLINE_S, lambda: f"no note any more: {status(cluster)}")
    job.hurry()
    assert job.await_outcome().exit_code == 0
    daemon.stop()
