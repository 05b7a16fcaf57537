"""Real etcd servers, and a relay that can freeze, for the tests of the store."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Generic, TypeVar

import psutil
import pytest

from bagua_agent.base.readable import readable
from bagua_agent.etcd.client import Store, StoreConfig
from bagua_agent.etcd.endpoints import parse_endpoints
from bagua_agent.etcd.leased_keys import LeasedKeys, LeaseEvent
from bagua_agent.etcd.server.embedded import UNIX, EmbeddedEtcd, fresh_directory
from tests.lab.free_port import free_port
from tests.lab.wait import HANG_S

T = TypeVar("T")
DEADLINE_S = 10.0


@pytest.fixture
def no_process_left() -> Iterator[None]:
    """A test that asks for it leaves no child. Other children of this run, as a warm parent, were there before."""
    before = set(psutil.Process().children())
    yield
    left = set(psutil.Process().children()) - before
    assert not [child for child in left if child.status() != psutil.STATUS_ZOMBIE]


class Server:
    """An etcd that can be killed, restarted on its data or without, frozen and thawed."""

    def __init__(self, listen: str) -> None:
        self._listen = listen
        self._directory = fresh_directory()
        self._frozen = False
        self._etcd = EmbeddedEtcd.start(listen, directory=self._directory)
        self.endpoint = self._etcd.endpoint

    @property
    def pid(self) -> int:
        return self._etcd.pid

    def kill(self) -> None:
        self._etcd.kill()

    def restart(self, lose_data: bool = False, set_back: bool = False, listen: str | None = None) -> None:
        """set_back: on the data of the last `back_up`. listen: elsewhere than where it is usually reached."""
        if lose_data or set_back:
            shutil.rmtree(self._directory / "data")
        if set_back:
            shutil.copytree(self._directory / "backup", self._directory / "data")
        self._etcd = EmbeddedEtcd.start(listen or self._listen, directory=self._directory)

    def back_up(self) -> None:
        """Of a server that was killed."""
        shutil.copytree(self._directory / "data", self._directory / "backup")

    def freeze(self) -> None:
        self._frozen = True
        os.kill(self._etcd.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, self._etcd.pid, os.WSTOPPED | os.WNOWAIT)  # until its last thread stands still

    def thaw(self) -> None:
        if self._frozen:
            os.kill(self._etcd.pid, signal.SIGCONT)
            self._frozen = False

    def end(self) -> None:
        self.thaw()
        self._etcd.stop()
        shutil.rmtree(self._directory)


class Recorder(Generic[T]):
    """A callback that remembers what it was called with, and a wait for what it should be called with."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._calls: list[T] = []

    def __call__(self, value: T) -> None:
        with self._changed:
            self._calls.append(value)
            self._changed.notify_all()

    @property
    def calls(self) -> list[T]:
        with self._changed:
            return list(self._calls)

    def wait_for(self, claim: Callable[[list[T]], bool], timeout_s: float = DEADLINE_S) -> list[T]:
        with self._changed:
            assert self._changed.wait_for(lambda: claim(self._calls), timeout_s), self._calls
            return list(self._calls)


def wait_until(claim: Callable[[], bool], timeout_s: float = DEADLINE_S) -> None:
    """Polls a condition that has no event, with a deadline."""
    deadline = time.monotonic() + timeout_s
    tick = threading.Event()
    while not claim():
        assert time.monotonic() < deadline, "not within the deadline"
        tick.wait(0.01)


class Relay:
    """A TCP address that passes everything on to another until it is frozen or cut. port: 0 for any."""

    def __init__(self, target: str, port: int = 0) -> None:
        host, _, target_port = target.removeprefix("http://").rpartition(":")
        self._target = (host, int(target_port))
        self._listener = socket.create_server(("127.0.0.1", port))
        self.endpoint = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._peers: dict[socket.socket, socket.socket] = {}
        self._commands, self._wake = os.pipe()
        self._frozen = False
        self.accepted = 0
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def freeze(self) -> None:
        os.write(self._wake, b"f")

    def cut(self) -> None:
        """Every connection breaks; new ones are accepted."""
        os.write(self._wake, b"c")

    def end(self) -> None:
        os.write(self._wake, b"q")
        self._thread.join(DEADLINE_S)
        os.close(self._wake)

    def _run(self) -> None:
        while True:
            sources = [] if self._frozen else [self._listener, *self._peers]
            for source in readable([self._commands, *sources]):
                if source == self._commands:
                    command = os.read(self._commands, 1)
                    self._frozen |= command == b"f"
                    if command != b"f":
                        for end in self._peers:
                            end.close()
                        self._peers.clear()
                    if command == b"q":
                        self._listener.close()
                        os.close(self._commands)
                        return
                    break
                if source is self._listener:
                    client, _ = self._listener.accept()
                    server = socket.create_connection(self._target)
                    self._peers |= {client: server, server: client}
                    self.accepted += 1
                elif source in self._peers:
                    self._pass_on(source)

    def _pass_on(self, source: socket.socket) -> None:
        try:
            data = source.recv(65536)
            if data:
                self._peers[source].sendall(data)
                return
        except OSError:
            pass  # either side broke: both end below
        other = self._peers.pop(source)
        self._peers.pop(other, None)
        source.close()
        other.close()


@pytest.fixture(params=["unix", "tcp"])
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    server = Server(UNIX if request.param == "unix" else f"127.0.0.1:{free_port()}")
    yield server
    server.end()


@pytest.fixture
def unix_server() -> Iterator[Server]:
    server = Server(UNIX)
    yield server
    server.end()


@pytest.fixture
def tcp_server() -> Iterator[Server]:
    server = Server(f"127.0.0.1:{free_port()}")
    yield server
    server.end()


@pytest.fixture
def make_store() -> Iterator[Callable[..., Store]]:
    stores: list[Store] = []

    def make(*endpoints: str, **settings: object) -> Store:
        store = Store(StoreConfig(parse_endpoints(",".join(endpoints)), **settings))  # type: ignore[arg-type]
        stores.append(store)
        return store

    yield make
    for store in stores:
        store.close()


@pytest.fixture
def make_relay() -> Iterator[Callable[[str], Relay]]:
    relays: list[Relay] = []

    def make(target: str) -> Relay:
        relays.append(Relay(target))
        return relays[-1]

    yield make
    for relay in relays:
        relay.end()


@pytest.fixture
def certificates(tmp_path: Path) -> Path:
    """ca.pem, server.pem/.key (for 127.0.0.1), client.pem/.key and stranger.pem (another authority)."""

    def openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=tmp_path, check=True, capture_output=True, timeout=HANG_S)

    new_key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")
    for name in ("ca", "stranger"):
        openssl(
            "req",
            "-x509",
            *new_key,
            "-keyout",
            f"{name}.key",
            "-out",
            f"{name}.pem",
            "-days",
            "2",
            "-subj",
            f"/CN={name}",
        )
    (tmp_path / "ext").write_text(
        "subjectAltName=IP:127.0.0.1,DNS:localhost\nextendedKeyUsage=serverAuth,clientAuth\n"
    )
    for name in ("server", "client"):
        openssl("req", *new_key, "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", f"/CN={name}")
        openssl(
            "x509",
            "-req",
            "-in",
            f"{name}.csr",
            "-CA",
            "ca.pem",
            "-CAkey",
            "ca.key",
            "-CAcreateserial",
            "-out",
            f"{name}.pem",
            "-days",
            "2",
            "-extfile",
            "ext",
        )
    return tmp_path


@pytest.fixture
def keep() -> Iterator[Callable[..., tuple[LeasedKeys, Recorder[LeaseEvent]]]]:
    made = []

    def make(store: Store, ttl_s: float = 3) -> tuple[LeasedKeys, Recorder[LeaseEvent]]:
        events: Recorder[LeaseEvent] = Recorder()
        keys = LeasedKeys(store, ttl_s, events)
        made.append(keys)
        return keys, events

    yield make
    for keys in made:
        keys.close(revoke=False)
