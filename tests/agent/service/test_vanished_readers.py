"""A reader of logs whose host has vanished gives its place back, though no packet ends its connection."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bagua_agent.security import grpc_security
from bagua_agent.service.logs.job_logs import JobLogs, Piece
from bagua_agent.service.node.node_server import NodeServer
from tests.lab.free_port import free_port

DEADLINE_S = 20.0

READER = """
import sys
import grpc
from bagua_contract import node_pb2, node_pb2_grpc
stub = node_pb2_grpc.NodeServiceStub(grpc.insecure_channel(sys.argv[1]))
request = node_pb2.ReadLogRequest(
    job_id="demo", directory="slot0-h1-a", stream=node_pb2.ReadLogRequest.STDOUT, follow=True
)
for chunk in stub.ReadLog(request):
    print(chunk.data, flush=True)
"""


class WatchedLogs(JobLogs):
    """ended: nothing reads any more."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.ended = threading.Event()

    def read(self, *arguments: Any, **options: Any) -> Iterator[Piece]:
        try:
            yield from super().read(*arguments, **options)
        finally:
            self.ended.set()


def test_a_reader_that_answers_nothing_any_more_loses_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grpc_security, "_KEEPALIVE_MS", 1000)
    worker = tmp_path / "demo" / "h1" / "slot0-h1-a"
    worker.mkdir(parents=True)
    (worker / "stdout.log").write_text("one\n")
    logs = WatchedLogs(tmp_path, "h1")
    address = f"127.0.0.1:{free_port()}"
    server = NodeServer(address, logs, lambda job_id: True, None)
    reader = subprocess.Popen(
        [sys.executable, "-c", READER, address], cwd=Path(__file__).parents[3], stdout=subprocess.PIPE
    )
    try:
        assert reader.stdout is not None
        assert reader.stdout.readline() == b"b'one\\n'\n"
        reader.send_signal(signal.SIGSTOP)  # its kernel keeps the connection, as a cut cable does
        assert logs.ended.wait(DEADLINE_S)
    finally:
        reader.kill()
        reader.communicate(timeout=DEADLINE_S)
        server.stop()
