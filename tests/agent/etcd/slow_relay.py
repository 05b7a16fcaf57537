"""A TCP address that leads to an etcd whose answers take long: a slow disk, or a host far away."""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest

_BYTES = 65536

MakeSlowRelay = Callable[[str, float], "SlowRelay"]


class SlowRelay:
    """Passes everything on at once, and what comes back delay_s after it came."""

    def __init__(self, target: str, delay_s: float) -> None:
        host, _, port = target.removeprefix("http://").rpartition(":")
        self._target = (host, int(port))
        self._delay_s = delay_s
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._lock = threading.Lock()
        self._sockets = [self._listener]
        self.accepted = 0
        self._start(self._accept)

    def end(self) -> None:
        with self._lock:
            for each in self._sockets:
                with contextlib.suppress(OSError):  # an end that is not connected any more
                    each.shutdown(socket.SHUT_RDWR)
                each.close()

    def _start(self, work: Callable[..., None], *arguments: object) -> None:
        threading.Thread(target=work, args=arguments, name="slow-relay", daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return  # ended
            server = socket.create_connection(self._target)
            with self._lock:
                self._sockets += [client, server]
                self.accepted += 1
            answers: queue.SimpleQueue[tuple[float, bytes]] = queue.SimpleQueue()
            self._start(self._pass_requests_on, client, server)
            self._start(self._read_answers, server, answers)
            self._start(self._answer, client, answers)

    def _pass_requests_on(self, client: socket.socket, server: socket.socket) -> None:
        with contextlib.suppress(OSError):  # either side broke
            while data := client.recv(_BYTES):
                server.sendall(data)
        with contextlib.suppress(OSError):
            server.shutdown(socket.SHUT_RDWR)

    def _read_answers(self, server: socket.socket, answers: queue.SimpleQueue[tuple[float, bytes]]) -> None:
        data = b"-"
        while data:
            try:
                data = server.recv(_BYTES)
            except OSError:
                data = b""
            answers.put((time.monotonic(), data))

    def _answer(self, client: socket.socket, answers: queue.SimpleQueue[tuple[float, bytes]]) -> None:
        while True:
            came_s, data = answers.get()
            if not data:
                with contextlib.suppress(OSError):
                    client.shutdown(socket.SHUT_RDWR)
                return
            time.sleep(max(0.0, came_s + self._delay_s - time.monotonic()))
            with contextlib.suppress(OSError):  # the client gave up
                client.sendall(data)


@pytest.fixture
def make_slow_relay() -> Iterator[MakeSlowRelay]:
    relays: list[SlowRelay] = []

    def make(target: str, delay_s: float) -> SlowRelay:
        relays.append(SlowRelay(target, delay_s))
        return relays[-1]

    yield make
    for relay in relays:
        relay.end()
