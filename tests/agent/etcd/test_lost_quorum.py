"""A mirror at a member of etcd that answers its clients but has lost its peers."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from bagua_agent.base.errors import StoreUnavailable
from bagua_agent.etcd.client import Store
from bagua_agent.etcd.mirror import Change, PrefixMirror
from bagua_agent.etcd.server.embedded import find_etcd
from tests.agent.etcd.conftest import Recorder, wait_until
from tests.lab.free_port import free_port
from tests.lab.wait import HANG_S

MEMBERS = 3


class Cluster:
    """Three members of etcd on this machine's loopback."""

    def __init__(self, directory: Path) -> None:
        clients, peers = ([f"http://127.0.0.1:{free_port()}" for _ in range(MEMBERS)] for _ in range(2))
        self.endpoints = [client.removeprefix("http://") for client in clients]
        self._processes = []
        for number, (client, peer) in enumerate(zip(clients, peers, strict=True)):
            options = {
                "name": f"m{number}",
                "data-dir": str(directory / f"m{number}"),
                "listen-client-urls": client,
                "advertise-client-urls": client,
                "listen-peer-urls": peer,
                "initial-advertise-peer-urls": peer,
                "initial-cluster": ",".join(f"m{n}={url}" for n, url in enumerate(peers)),
                "log-level": "error",
            }
            argv = [find_etcd(), *(f"--{key}={value}" for key, value in options.items())]
            with (directory / f"m{number}.log").open("wb") as log:
                self._processes.append(subprocess.Popen(argv, stdout=log, stderr=log))

    def freeze_peers_of_first(self) -> None:
        for process in self._processes[1:]:
            os.kill(process.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        for process in self._processes:
            os.kill(process.pid, signal.SIGCONT)

    def end(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait(HANG_S)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    made = Cluster(tmp_path)
    yield made
    made.end()


def serves(store: Store) -> bool:
    try:
        store.connect(1.0)
    except StoreUnavailable:
        return False
    return True


def test_a_watch_at_a_member_without_a_leader_ends(
    cluster: Cluster, make_store: Callable[..., Store]
) -> None:
    """The member answers requests for a sign of life by itself, so the stream looks alive."""
    store = make_store(cluster.endpoints[0])
    wait_until(lambda: serves(store), HANG_S)
    changes: Recorder[tuple[Change, ...]] = Recorder()
    connection: Recorder[bool] = Recorder()
    mirror = PrefixMirror(store, "/m/", changes, connection)
    mirror.start(HANG_S)
    try:
        connection.wait_for(lambda c: c == [True], HANG_S)
        cluster.freeze_peers_of_first()
        connection.wait_for(lambda c: c == [True, False], HANG_S)
        cluster.thaw()
        connection.wait_for(lambda c: c[-1], HANG_S)
        store.put("/m/a", b"1", timeout_s=HANG_S)
        changes.wait_for(lambda c: [one.key for batch in c for one in batch] == ["/m/a"], HANG_S)
    finally:
        mirror.stop()
