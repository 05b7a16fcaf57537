"""Calls of a daemon whose request never comes: each takes a thread until it ends."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from bagua_agent.security.certificate_files import TlsFiles, utc_now
from bagua_agent.security.grpc_security import channel_credentials
from bagua_agent.security.tls_renewal import RenewedTls
from bagua_agent.service.logs.job_logs import JobLogs
from bagua_agent.service.node import caller_limits
from bagua_agent.service.node.node_server import MOST_CALLS, NodeServer
from bagua_contract import node_pb2, node_pb2_grpc
from tests.agent.service.conftest import People
from tests.lab.free_port import free_port
from tests.lab.wait import eventually

DEADLINE_S = 20.0
LIST, READ = "/bagua.v1.NodeService/ListLogs", "/bagua.v1.NodeService/ReadLog"


class Daemon:
    def __init__(self, log_dir: Path, people: People) -> None:
        self._people = people
        self._address = f"127.0.0.1:{free_port()}"
        self._channels: list[grpc.Channel] = []
        self._silence_ends = threading.Event()
        tls = RenewedTls(people.files["node-1"])
        self._server = NodeServer(self._address, JobLogs(log_dir, "h1"), lambda job_id: True, tls)

    def connect(self, files: TlsFiles) -> grpc.Channel:
        self._channels.append(
            grpc.secure_channel(
                self._address, channel_credentials(files, utc_now()), [("grpc.use_local_subchannel_pool", 1)]
            )
        )
        return self._channels[-1]

    def list_logs(self, name: str) -> node_pb2.ListLogsReply:
        stub = node_pb2_grpc.NodeServiceStub(self.connect(self._people.files[name]))
        return stub.ListLogs(node_pb2.ListLogsRequest(job_id="demo"), timeout=DEADLINE_S)

    def call_without_request(self, name: str, calls: int, method: str = LIST) -> list[grpc.Future]:
        def nothing() -> Iterator[bytes]:
            self._silence_ends.wait(3 * DEADLINE_S)
            return iter(())

        channels = [self.connect(self._people.files[name]) for _ in range(-(-calls // 50))]
        going = []
        for n in range(calls):
            open_call = getattr(channels[n // 50], "stream_unary" if method == LIST else "stream_stream")(
                method
            )
            silent = (message for source in [nothing] for message in source())
            going.append(open_call.future(silent) if method == LIST else open_call(silent))
        return going

    def end(self) -> None:
        self._silence_ends.set()
        for channel in self._channels:
            channel.close()
        self._server.stop()


@pytest.fixture
def daemon(tmp_path: Path, people: People) -> Iterator[Daemon]:
    made = Daemon(tmp_path, people)
    yield made
    made.end()


@pytest.mark.parametrize("method", [LIST, READ])
def test_a_caller_whose_requests_do_not_come_keeps_no_other_out(daemon: Daemon, method: str) -> None:
    going = daemon.call_without_request("vic", MOST_CALLS, method)

    def refused() -> list[grpc.Future]:
        return [call for call in going if call.done()]

    eventually(
        lambda: len(refused()) >= MOST_CALLS - caller_limits.MOST_AWAITED,
        DEADLINE_S,
        "the others are refused",
    )
    first = refused()[0].exception()
    assert isinstance(first, grpc.RpcError)
    assert first.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "'vic' has too many calls here without a request" in (first.details() or "")
    daemon.list_logs("ann")


def test_a_caller_is_not_blamed_for_the_calls_of_others(
    tmp_path: Path, people: People, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(caller_limits, "MOST_READERS", 3)
    monkeypatch.setattr(caller_limits, "REQUEST_TIMEOUT_S", DEADLINE_S)
    daemon = Daemon(tmp_path, people)

    going = daemon.call_without_request("vic", 3)

    def refusal() -> str:
        # ann's own call may have had a place when the last of vic's came: that one was refused.
        going[:] = [call for call in going if not call.done()]
        going.extend(daemon.call_without_request("vic", 3 - len(going)))
        try:
            daemon.list_logs("ann")
        except grpc.RpcError as error:
            return str(error.details())
        return ""

    try:
        why = eventually(refusal, DEADLINE_S, "all places are taken")
    finally:
        daemon.end()
    assert why == "callers have too many calls here without a request; try again later" and len(going) == 3


def test_a_call_whose_request_does_not_come_ends(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(caller_limits, "REQUEST_TIMEOUT_S", 0.2)
    going = daemon.call_without_request("vic", caller_limits.MOST_AWAITED)
    for call in going:
        assert call.exception(DEADLINE_S).code() is grpc.StatusCode.CANCELLED
    daemon.list_logs("vic")


def test_a_call_that_ends_without_a_request_is_refused(daemon: Daemon, people: People) -> None:
    call = daemon.connect(people.files["vic"]).stream_unary(LIST)
    with pytest.raises(grpc.RpcError, match="the call has no request"):
        call(iter(()), timeout=DEADLINE_S)
