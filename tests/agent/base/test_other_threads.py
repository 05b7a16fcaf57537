"""Threads that are not of background.py (OTHERS in test_background.py), met with every kind of error.

An executor of gRPC answers its caller once, and goes on. SystemExit is left out there: gRPC drops it, and no method
ends the process.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import grpc
import pytest

from bagua_agent.base import small_http
from bagua_agent.etcd.client import KeyValue
from bagua_agent.job.new_identity import make_identity
from bagua_agent.node.torchrun.health_server import health_server
from bagua_agent.observation import agent_calls
from bagua_agent.rpc import session_server
from bagua_agent.rpc.control_client import probe
from bagua_agent.rpc.control_server import ControlServer
from bagua_agent.service.node.node_server import NodeServer
from bagua_agent.workers import stacks
from bagua_contract import control_pb2, node_pb2, node_pb2_grpc, session_pb2
from bagua_contract import membership_pb2 as pb
from tests.agent.base.test_background import ERRORS, OTHERS
from tests.core.elastic.agents import Agent
from tests.fuzz.test_session_service import Stranger, check_served
from tests.lab.free_port import free_port

DEADLINE_S = 10.0
MET_BY_GRPC = [make for make in ERRORS if isinstance(make(), Exception)]

Fail = Callable[..., Any]


def control(fail: Fail, patch: pytest.MonkeyPatch) -> None:
    identity = make_identity("job")
    server = ControlServer("127.0.0.1", identity, "a", fail)
    try:
        for _ in range(2):
            reply = probe(identity, server.address, "a", DEADLINE_S)
            assert reply.verdict != control_pb2.ProbeReply.ALIVE
    finally:
        server.stop()


def session(fail: Fail, patch: pytest.MonkeyPatch) -> None:
    agent = Agent("w0", "w1")
    try:
        with patch.context() as failing:
            failing.setattr(session_server, "first_of", fail)
            stranger = Stranger(agent.socket)
            try:
                stranger.say(session_pb2.WorkerMessage(ready=session_pb2.Ready()))
                assert stranger.ending() is grpc.StatusCode.UNKNOWN
            finally:
                stranger.hang_up()
        check_served(agent)
    finally:
        agent.close()


def node(fail: Fail, patch: pytest.MonkeyPatch) -> None:
    address = f"127.0.0.1:{free_port()}"
    logs = type("Logs", (), {"list": fail, "read": fail})()
    server = NodeServer(address, cast(Any, logs), lambda job_id: False, None)
    try:
        with grpc.insecure_channel(address) as channel:
            stub = node_pb2_grpc.NodeServiceStub(channel)  # type: ignore[no-untyped-call]
            for _ in range(2):
                with pytest.raises(grpc.RpcError):
                    stub.ListLogs(node_pb2.ListLogsRequest(job_id="job"), timeout=DEADLINE_S)
                with pytest.raises(grpc.RpcError):
                    list(stub.ReadLog(node_pb2.ReadLogRequest(job_id="job"), timeout=DEADLINE_S))
    finally:
        server.stop()


def health(fail: Fail, patch: pytest.MonkeyPatch) -> None:
    """The timer of a slow client: whatever its connection raises there, the next check is answered."""
    patch.setattr(small_http, "REQUEST_TIMEOUT_S", 0.2)
    port = free_port()
    server = health_server(port, lambda asked: asked.answered.set())
    server.start()
    try:
        with socket.create_connection(("127.0.0.1", port), DEADLINE_S) as slow:
            slow.settimeout(DEADLINE_S)
            assert slow.recv(1) == b"", "the server shuts it"
        with socket.create_connection(("127.0.0.1", port), DEADLINE_S) as client:
            client.settimeout(DEADLINE_S)
            client.sendall(b"GET / HTTP/1.0\r\n\r\n")
            assert client.recv(100).startswith(b"HTTP/1.0 200")
    finally:
        server.stop()


def saving(fail: Fail, patch: pytest.MonkeyPatch) -> None:
    """It raises in the thread that asked, which is of background.py."""
    patch.setattr(stacks, "_save", fail)
    with pytest.raises(BaseException) as met:
        stacks.save_stacks([cast(Any, None)] * 3, "why", native=False)
    assert type(met.value) in {type(make()) for make in ERRORS}


def asking_agents(fail: Fail, patch: pytest.MonkeyPatch) -> None:
    """It raises in the thread that asked, which is of background.py or a command's own."""
    patch.setattr(agent_calls.JobAgents, "_keep", lambda *_: None)
    patch.setattr(agent_calls, "endpoint_of", fail)
    agents = agent_calls.JobAgents(cast(Any, None), "demo")
    key = KeyValue("agents/a", pb.Agent(agent_id="a", control_address="h:1").SerializeToString(), 1, 1, 0)
    with pytest.raises(BaseException) as met:
        agents.look([key])
    agents.close()
    assert type(met.value) in {type(make()) for make in ERRORS}


# It suppresses OSError, and nothing else can be raised there
ROWS: dict[str, tuple[Callable[[Fail, pytest.MonkeyPatch], None], list[Callable[[], BaseException]]]] = {
    "rpc/control_server.py": (control, MET_BY_GRPC),
    "rpc/session_server.py": (session, MET_BY_GRPC),
    "service/node/node_server.py": (node, MET_BY_GRPC),
    "rpc/first_message.py": (session, []),  # tests/fuzz/test_session_service.py meets it with a silent client
    "base/small_http.py": (
        health,
        [],
    ),
    "observation/agent_calls.py": (asking_agents, list(ERRORS)),
    "workers/stacks.py": (saving, list(ERRORS)),
}


def test_every_other_thread_is_here() -> None:
    assert set(ROWS) == set(OTHERS) - {"base/background.py"}


@pytest.mark.parametrize(
    ("drive", "make"),
    [
        pytest.param(drive, make, id=f"{Path(name).stem}-{type(make()).__name__}")
        for name, (drive, errors) in ROWS.items()
        for make in errors
    ],
)
def test_whatever_it_meets_reaches_who_asked(
    drive: Callable[[Fail, pytest.MonkeyPatch], None],
    make: Callable[[], BaseException],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    met: list[BaseException] = []

    def fail(*arguments: object, **keywords: object) -> Any:
        met.append(make())
        raise met[-1]

    drive(fail, monkeypatch)
    assert met, "the fault happened"


def test_a_slow_client_ends_no_health_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    health(lambda: None, monkeypatch)
