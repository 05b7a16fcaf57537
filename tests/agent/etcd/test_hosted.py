"""A hosted etcd that is killed, damaged or can't start: real servers, real kills."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from bagua_agent.etcd.client import Store, StoreConfig
from bagua_agent.etcd.endpoints import parse_endpoints
from bagua_agent.etcd.server import hosted, restart_plan
from bagua_agent.etcd.server.embedded import UNIX, find_etcd
from bagua_agent.etcd.server.hosted import HostedEtcd
from tests.agent.etcd.conftest import wait_until
from tests.lab.descriptors import thousand_descriptors
from tests.lab.free_port import free_port

ETCD = find_etcd()


class Kept:
    """A hosted etcd that is kept up, and what was told of it."""

    def __init__(self, directory: Path, listen: str) -> None:
        self.etcd = HostedEtcd.start(listen, directory=directory)
        self.pids: list[int] = []
        self.told: list[str] = []
        self.etcd.keep_up(self.pids.append, self.told.append)
        self.store = Store(StoreConfig(parse_endpoints(self.etcd.endpoint)))

    def kill(self) -> None:
        os.kill(self.etcd.pid, signal.SIGKILL)

    def await_servers(self, count: int) -> None:
        wait_until(lambda: len(self.pids) == count)

    def close(self) -> None:
        self.store.close()
        self.etcd.stop()


Keep = Callable[[str], Kept]


@pytest.fixture
def keep(tmp_path: Path) -> Iterator[Keep]:
    made: list[Kept] = []
    threads = set(threading.enumerate())
    children = set(psutil.Process().children())

    def start(listen: str = UNIX) -> Kept:
        made.append(Kept(tmp_path / "etcd", listen))
        return made[-1]

    yield start
    for kept in made:
        kept.close()
        kept.close()  # again is fine
    assert not [t for t in set(threading.enumerate()) - threads if t.name == "bagua-hosted-etcd"]
    assert not [c for c in set(psutil.Process().children()) - children if "etcd" in c.name()]


@pytest.mark.parametrize("kind", ["unix", "tcp"])
def test_killed_it_is_there_again_with_its_data_at_the_same_place(keep: Keep, kind: str) -> None:
    kept = keep(UNIX if kind == "unix" else f"127.0.0.1:{free_port()}")
    endpoint, first = kept.etcd.endpoint, kept.etcd.pid
    assert kept.pids == [first]
    kept.store.put("/a", b"kept")
    lease = kept.store.lease_grant(5, 2.0)
    killed_at_s = time.monotonic()
    kept.kill()
    kept.await_servers(2)
    assert time.monotonic() - killed_at_s < 2.0
    assert kept.etcd.endpoint == endpoint and kept.etcd.pid == kept.pids[1] != first
    found = kept.store.get("/a")
    assert found is not None and found.value == b"kept"
    assert kept.store.lease_keepalive_once(lease.lease_id, 2.0).ttl_s > 0, "its leases live on"
    assert kept.told == [
        f"the etcd that this node hosts was killed by SIGKILL; starting it again at {endpoint}"
    ]


def test_killed_again_and_again(keep: Keep) -> None:
    kept = keep(UNIX)
    for count in (2, 3, 4):
        kept.kill()
        kept.await_servers(count)
    kept.store.put("/a", b"")
    assert len(set(kept.pids)) == 4
    assert len(kept.told) == 1, "a row of ends is one incident"


def damage(directory: Path) -> None:
    files = [path for path in (directory / "data").rglob("*") if path.is_file()]
    assert files
    for path in files:
        with path.open("r+b") as file:
            file.write(os.urandom(min(path.stat().st_size, 1 << 20)))


def test_damaged_data_are_left_behind(keep: Keep) -> None:
    kept = keep(UNIX)
    kept.store.put("/a", b"lost")
    os.kill(kept.etcd.pid, signal.SIGSTOP)
    damage(kept.etcd.directory)
    kept.kill()
    kept.await_servers(2)
    assert kept.store.get("/a") is None
    kept.store.put("/a", b"new")
    assert len(kept.told) == 2 and "starting it on none" in kept.told[1]


def test_one_that_can_never_start_is_given_up_with_the_reason(
    keep: Keep, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(restart_plan, "FIRST_PAUSE_S", 0.01)
    kept = keep(f"127.0.0.1:{free_port()}")
    port = int(kept.etcd.endpoint.rpartition(":")[2])
    os.kill(kept.etcd.pid, signal.SIGSTOP)
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as thief:
        monkeypatch.setattr(restart_plan, "MOST_IN_VAIN", 2)
        monkeypatch.setattr("bagua_agent.etcd.server.embedded.find_etcd", lambda: _steal(thief, port))
        kept.kill()
        wait_until(lambda: len(kept.told) == 2)
    assert "given up after 2 attempts" in kept.told[1] and "the port is taken" in kept.told[1]
    assert len(kept.pids) == 1


def _steal(thief: socket.socket, port: int) -> str:
    """The path of an etcd that finds its port taken."""
    if thief.getsockname()[1] == 0:
        thief.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        thief.bind(("127.0.0.1", port))
        thief.listen()
    return ETCD


@pytest.mark.usefixtures("no_process_left")
def test_a_start_that_no_thread_waits_for_any_more_ends_soon(
    keep: Keep, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = keep(UNIX)
    binary = tmp_path / "etcd-that-never-answers"
    binary.write_text("#!/bin/sh\nexec sleep 60\n")
    binary.chmod(0o755)
    launched = threading.Event()

    def find() -> str:
        launched.set()
        return str(binary)

    monkeypatch.setattr("bagua_agent.etcd.server.embedded.find_etcd", find)
    kept.kill()
    assert launched.wait(5.0)
    began_s = time.monotonic()
    kept.etcd.stop()
    assert time.monotonic() - began_s < hosted._THREAD_ENDS_S / 2


def test_an_agent_with_a_thousand_descriptors_hosts_one(keep: Keep) -> None:
    with thousand_descriptors():
        kept = keep(UNIX)
        kept.kill()
        kept.await_servers(2)
        kept.store.put("k", b"v", timeout_s=10.0)
