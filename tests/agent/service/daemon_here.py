"""A node's daemon, in this process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from bagua_agent.base.errors import UserError
from bagua_agent.cluster.cluster_policy import ClusterPolicy
from bagua_agent.etcd.client import Store
from bagua_agent.etcd.leased_keys import LeasedKeys
from bagua_agent.etcd.server.embedded import EmbeddedEtcd
from bagua_agent.service.blocking_work import ThisNode
from bagua_agent.service.config import agent_config
from bagua_agent.service.config.agent_config import AgentConfig
from bagua_agent.service.daemon import NodeDaemon
from bagua_agent.service.node.node_facts import NodeFacts
from bagua_agent.service.units.units import FoundUnit
from tests.agent.etcd.conftest import Server

NODE = "n0"
LEASE_S = 60.0  # outlives every test
_END_S = 20.0


class NoUnits:
    def found(self) -> list[FoundUnit]:
        return []


def config_of(etcd: EmbeddedEtcd | Server, folder: Path) -> AgentConfig:
    content = {
        "insecure": True,
        "times": {"node_lease_s": 2},
        "etcd": {"endpoints": [etcd.endpoint]},
        "node": {"name": NODE, "slots": 1},
        "jobs": {"users": ["root", "no-such-account"]},
        "directories": {name: str(folder / name) for name in ("state", "log")},
    }
    return agent_config.check(content, "test", NODE)


@contextmanager
def running_daemon(
    etcd: EmbeddedEtcd | Server,
    store: Store,
    folder: Path,
    look_for_trouble: Callable[[], tuple[str, ...]] = tuple,
    units: object | None = None,
    *,
    look_for_notes: Callable[[], tuple[str, ...]] = tuple,
    lease_s: float = LEASE_S,
    boot_id: str = "boot",
    ends: list[BaseException] | None = None,
    policy: ClusterPolicy | None = None,
) -> Iterator[list[str]]:
    """What it says, while it runs. units: what it asks of its units; there are none if None. boot_id: of its host.
    ends: takes the error that ends it."""
    leased, said = LeasedKeys(store, lease_s), list[str]()
    daemon = NodeDaemon(
        config_of(etcd, folder),
        ThisNode(NodeFacts(1, 0, boot_id), "127.0.0.1:1", "0", look_for_trouble, look_for_notes),
        store,
        leased,
        units or NoUnits(),  # type: ignore[arg-type]
        said.append,
        policy,
    )

    def run() -> None:
        try:
            daemon.run()
        except UserError as error:
            if ends is None:
                raise
            ends.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield said
    finally:
        daemon.stop()
        thread.join(_END_S)
        leased.close()
    assert not thread.is_alive()
