"""Calls of etcd's client end in time although the server says goodbye under them and takes no new connection.

gRPC's own retries would lose parts of such a call, and its reader would wait for ever.
"""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Callable, Iterator

import pytest

from bagua_agent.etcd.client import StoreConfig
from bagua_agent.etcd.connection import Connection
from bagua_agent.etcd.endpoints import Endpoint, parse_endpoint
from bagua_agent.etcd.failures import CallFailed
from bagua_agent.etcd.key_range import KeyRange
from bagua_agent.etcd.watch_stream import WatchStream
from bagua_contract import etcd_pb2 as pb
from tests.agent.etcd.conftest import DEADLINE_S

_HEADERS, _RST_STREAM, _SETTINGS, _PING, _GOAWAY = 1, 3, 4, 6, 7  # types of HTTP/2's frames
_END_STREAM, _END_HEADERS, _ACK = 1, 4, 1  # flags
_OFTEN = 20  # which part of a call is lost depends on its threads


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + payload


def header(name: bytes, value: bytes) -> bytes:
    """Not indexed."""
    return bytes([0, len(name)]) + name + bytes([len(value)]) + value


class DepartingServer:
    """Answers the first call of one client with an error of etcd's, takes no other connection from then on, and
    leaves at the second call, which it has not processed."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint: Endpoint = parse_endpoint(f"127.0.0.1:{self._listener.getsockname()[1]}")
        self.has_left = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def end(self) -> None:
        self._listener.close()
        self._thread.join(DEADLINE_S)

    def _serve(self) -> None:
        self._listener.settimeout(DEADLINE_S)
        client, _ = self._listener.accept()
        with client, client.makefile("rb") as received:
            client.settimeout(DEADLINE_S)
            received.read(24)  # the preface
            client.sendall(frame(_SETTINGS, 0, 0))
            answered = 0
            while len(head := received.read(9)) == 9:
                kind, flags, stream = head[3], head[4], int.from_bytes(head[5:], "big")
                payload = received.read(int.from_bytes(head[:3], "big"))
                if kind in (_SETTINGS, _PING) and not flags & _ACK:
                    client.sendall(frame(kind, _ACK, 0, payload if kind == _PING else b""))
                elif kind == _HEADERS and not answered:
                    self._listener.close()  # before the answer, after which the second call comes
                    client.sendall(_error(stream))
                    answered = stream
                elif kind == _HEADERS:
                    client.sendall(frame(_GOAWAY, 0, 0, struct.pack(">II", answered, 0)))
                    self.has_left.set()
                    return


def _error(stream: int) -> bytes:
    fields = b"\x88" + header(b"content-type", b"application/grpc") + header(b"grpc-status", b"14")
    trailers = frame(_HEADERS, _END_HEADERS | _END_STREAM, stream, fields)
    return trailers + frame(_RST_STREAM, 0, stream, struct.pack(">I", 0))


@pytest.fixture
def departing() -> Iterator[Callable[[], DepartingServer]]:
    made: list[DepartingServer] = []

    def make() -> DepartingServer:
        made.append(DepartingServer())
        return made[-1]

    yield make
    for server in made:
        server.end()


def keep_a_lease(connection: Connection) -> None:
    connection.call(lambda c: c.raw(c.renewalstub.LeaseKeepAlive, pb.LeaseKeepAliveRequest(ID=1)), DEADLINE_S)


def read_a_key(connection: Connection) -> None:
    connection.call(lambda c: c.raw(c.kvstub.Range, pb.RangeRequest(key=b"/a")), DEADLINE_S)


def watch_a_key(connection: Connection) -> None:
    for _ in WatchStream(connection, [(KeyRange.of_key("/a"), 1)], DEADLINE_S):
        pass


def call_twice(server: DepartingServer, request_of: Callable[[Connection], None]) -> None:
    """The first call connects."""
    connection = Connection(server.endpoint, StoreConfig((server.endpoint,)))
    for request in (read_a_key, request_of):
        with pytest.raises(CallFailed):
            request(connection)
    connection.close()


@pytest.mark.parametrize("request_of", [keep_a_lease, read_a_key, watch_a_key])
def test_a_call_ends_although_the_server_leaves(
    departing: Callable[[], DepartingServer], request_of: Callable[[Connection], None]
) -> None:
    for _ in range(_OFTEN):
        server = departing()
        calls = threading.Thread(target=call_twice, args=(server, request_of), daemon=True)
        calls.start()
        calls.join(2 * DEADLINE_S)
        assert not calls.is_alive(), "the call or the close of its connection hangs"
        assert server.has_left.wait(DEADLINE_S)
