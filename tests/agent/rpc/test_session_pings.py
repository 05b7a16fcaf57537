"""gRPC does not measure the bandwidth of a worker's session: each measurement is a ping, after almost every report."""

from __future__ import annotations

import queue
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from bagua_agent.rpc.session_server import SessionServer
from bagua_contract import session_pb2, session_pb2_grpc
from bagua_contract.grpc_channel import open_channel
from bagua_contract.records import PROTOCOL_VERSION
from tests.lab.recorded_relay import RecordedRelay, frames, pings, window_bytes
from tests.lab.wait import HANG_S

REPORTS = 10


@pytest.fixture
def directory() -> Iterator[Path]:
    # not tmp_path: a socket's path has little room
    with tempfile.TemporaryDirectory(prefix="bagua-test-") as directory:
        yield Path(directory)


def test_reports_of_progress_cause_no_pings(directory: Path) -> None:
    heard: queue.SimpleQueue[session_pb2.WorkerMessage] = queue.SimpleQueue()
    server = SessionServer(str(directory / "agent"), 1, lambda _, message: heard.put(message))
    server.expect("a.0.x")
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(directory / "relay"))
    listener.listen()

    def connect() -> socket.socket:
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(str(directory / "agent"))
        return connection

    relay = RecordedRelay(listener, connect)
    said: queue.SimpleQueue[session_pb2.WorkerMessage | None] = queue.SimpleQueue()
    hello = session_pb2.Hello(protocol=PROTOCOL_VERSION, worker_id="a.0.x")
    with open_channel(f"unix:{directory / 'relay'}") as channel:
        call = session_pb2_grpc.WorkerSessionStub(channel).Attach(iter(said.get, None))
        said.put(session_pb2.WorkerMessage(hello=hello))
        for number in range(REPORTS):
            said.put(session_pb2.WorkerMessage(progress=session_pb2.Progress(step=number)))
            heard.get(timeout=HANG_S)
        [asked], [answered] = [bytes(s) for s in relay.asked], [bytes(s) for s in relay.answered]
        said.put(None)
        call.cancel()
    server.stop()
    relay.end()
    assert sum(1 for _ in frames(asked)) > REPORTS
    assert pings(answered) == 0
    assert window_bytes(answered) == 4 << 20
