"""Connections of clients without a certificate, stalled or closed within the handshake, and what they cost a daemon."""

from __future__ import annotations

import os
import select
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest

from bagua_agent.rpc import job_identity
from bagua_agent.security.certificate_files import (
    TlsFiles,
    create_authority,
    files_in,
    issue_files,
    utc_now,
)
from bagua_agent.security.certificates import Role
from bagua_agent.security.grpc_security import channel_credentials, server_credentials, server_options
from bagua_agent.security.tls_renewal import RenewedTls
from tests.agent.service.conftest import People
from tests.lab.wait import eventually

DEADLINE_S = 20.0
CLIENTS, ROUNDS, AT_ONCE = 4, 20, 50  # 4,000 connections, 200 at a time

DAEMON = """
import resource
import sys
from concurrent.futures import ThreadPoolExecutor
import grpc
from bagua_agent.security.certificate_files import TlsFiles
from bagua_agent.security.grpc_security import server_credentials, server_options
from bagua_agent.security.tls_renewal import RenewedTls

descriptors = int(sys.argv[1])
resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
server = grpc.server(ThreadPoolExecutor(2), options=server_options())
look = grpc.unary_unary_rpc_method_handler(lambda request, context: request)
server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Daemon", {"Look": look}),))
credentials = server_credentials(RenewedTls(TlsFiles(*sys.argv[2:])))
print(server.add_secure_port("127.0.0.1:0", credentials), flush=True)
server.start()
sys.stdin.read()
"""


class Daemon:
    """A process of its own, which a defect of gRPC's core may end."""

    def __init__(self, files: TlsFiles, descriptors: int = 1024) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", DAEMON, str(descriptors), files.ca_file, files.cert_file, files.key_file],
            cwd=Path(__file__).parents[3],
            env=os.environ | {"GRPC_VERBOSITY": "NONE"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self.process.stdout is not None
        self.port = int(self.process.stdout.readline())

    def call(self, files: TlsFiles) -> bytes:
        options = [("grpc.use_local_subchannel_pool", 1)]
        credentials = channel_credentials(files, utc_now())
        with grpc.secure_channel(f"127.0.0.1:{self.port}", credentials, options) as channel:
            answer: bytes = channel.unary_unary("/test.Daemon/Look")(
                b"r", timeout=DEADLINE_S, wait_for_ready=True
            )
            return answer

    def end(self) -> None:
        self.process.communicate(timeout=DEADLINE_S)  # its standard input ends


@pytest.fixture
def daemon(people: People) -> Iterator[Daemon]:
    made = Daemon(people.files["node-1"])
    yield made
    made.end()


@pytest.mark.parametrize(
    "first_bytes",
    [
        pytest.param(b"", id="silent"),
        pytest.param(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", id="half a ClientHello"),
        pytest.param(b"GET / HTTP/1.1\r\n\r\n", id="no TLS"),
    ],
)
def test_thousands_of_stalled_handshakes_leave_the_server_alive(
    daemon: Daemon, people: People, first_bytes: bytes
) -> None:
    """gRPC's core frees a configuration of certificates that another connection still takes, if each gets its own."""
    refused: list[OSError] = []

    def stall_and_close() -> None:
        for _ in range(ROUNDS):
            held: list[socket.socket] = []
            try:
                for _ in range(AT_ONCE):
                    held.append(socket.create_connection(("127.0.0.1", daemon.port), DEADLINE_S))
                    held[-1].sendall(first_bytes)
            except OSError as error:
                refused.append(error)
            finally:
                for connection in held:
                    connection.close()

    clients = [threading.Thread(target=stall_and_close) for _ in range(CLIENTS)]
    for client in clients:
        client.start()
    for client in clients:
        client.join(DEADLINE_S)
    assert daemon.process.poll() is None
    assert daemon.call(people.files["ann"]) == b"r"
    assert refused == []


def test_connections_leave_the_process_half_of_its_descriptors(people: People) -> None:
    daemon = Daemon(people.files["node-1"], descriptors=256)
    held: list[socket.socket] = []
    try:
        for _ in range(400):
            held.append(socket.create_connection(("127.0.0.1", daemon.port), DEADLINE_S))
        eventually(lambda: closed_among(held) >= 400 - 128, DEADLINE_S, "the others are hung up on")
        assert len(os.listdir(f"/proc/{daemon.process.pid}/fd")) < 200
        while held:
            held.pop().close()
        assert daemon.call(people.files["ann"]) == b"r"
    finally:
        for connection in held:
            connection.close()
        daemon.end()


def closed_among(connections: list[socket.socket]) -> int:
    poll = select.poll()
    for connection in connections:
        poll.register(connection, select.POLLIN)
    return len(poll.poll(0))


def test_a_silent_client_is_hung_up_on(people: People, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_identity, "_MS_FOR_A_HANDSHAKE", 300)
    server = grpc.server(ThreadPoolExecutor(1), options=server_options())
    port = server.add_secure_port("127.0.0.1:0", server_credentials(RenewedTls(people.files["node-1"])))
    server.start()
    try:
        with socket.create_connection(("127.0.0.1", port), DEADLINE_S) as stranger:
            assert stranger.recv(1) == b""
    finally:
        server.stop(0).wait(DEADLINE_S)


def test_a_configuration_is_given_only_when_the_certificate_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = utc_now()
    create_authority(tmp_path, now=now)
    issue_files(tmp_path, "node", Role.AGENT, now=now, hosts=["localhost"])
    shutil.copytree(tmp_path / "node", tmp_path / "used")
    fetchers: list[Callable[[], object]] = []
    monkeypatch.setattr(
        grpc, "dynamic_ssl_server_credentials", lambda first, fetcher, **options: fetchers.append(fetcher)
    )
    server_credentials(RenewedTls(files_in(tmp_path / "used")))
    (fetch,) = fetchers
    assert [fetch() for _ in range(3)] == [None] * 3
    issue_files(tmp_path, "node", Role.AGENT, now=now, hosts=["localhost"], replace=True)
    for file in ("key.pem", "certificate.pem"):
        shutil.copy2(tmp_path / "node" / file, tmp_path / "used" / file)
    assert fetch() is not None
    assert fetch() is None
