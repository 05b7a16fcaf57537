"""The agent's TCP port against any client: it answers for its own job, and goes on answering."""

from __future__ import annotations

import math
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import grpc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bagua_agent.job.new_identity import make_identity
from bagua_agent.rpc import control_server, job_identity
from bagua_agent.rpc.control_client import probe, probe_through
from bagua_agent.rpc.control_server import ControlServer
from bagua_agent.rpc.job_identity import listen, open_channel
from bagua_contract import control_pb2

JOB = make_identity("job")
REFUSED = control_pb2.ProbeReply.REFUSED
ALIVE = control_pb2.ProbeReply.ALIVE
UNANSWERED = control_pb2.ProbeReply.UNANSWERED
DEADLINE_S = 10.0
FUZZ = settings(max_examples=40)


@pytest.fixture
def server() -> Iterator[ControlServer]:
    server = ControlServer("127.0.0.1", JOB, "a", lambda: ["w0"])
    yield server
    server.stop()


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    """Takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0), backlog=64) as silent:
        yield silent


def address_of(listener: socket.socket) -> str:
    return f"127.0.0.1:{listener.getsockname()[1]}"


def relay(
    server: ControlServer, address: str, timeout_s: float, job_id: str = "job"
) -> control_pb2.ProbeReply:
    """Ask `server` to probe `address`; unlike probe_through, with the timeout as it is."""
    request = control_pb2.ProbeForRequest(
        request=control_pb2.ProbeRequest(job_id=job_id, agent_id="a"),
        control_address=address,
        timeout_s=timeout_s,
    )
    with open_channel(server.address, JOB) as channel:
        call = channel.unary_unary(
            "/bagua.v1.AgentControl/ProbeFor",
            request_serializer=control_pb2.ProbeForRequest.SerializeToString,
            response_deserializer=control_pb2.ProbeReply.FromString,
        )
        reply: control_pb2.ProbeReply = call(request, timeout=DEADLINE_S)
        return reply


def check_alive(server: ControlServer, within_s: float = DEADLINE_S) -> None:
    reply = probe(JOB, server.address, "a", within_s)
    assert (reply.verdict, list(reply.workers)) == (ALIVE, ["w0"])


@given(junk=st.binary(min_size=1, max_size=200))
@FUZZ
def test_bytes_that_are_no_grpc(server: ControlServer, junk: bytes) -> None:
    host, _, port = server.address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=DEADLINE_S) as stranger:
        stranger.sendall(junk)
    check_alive(server)


@given(junk=st.binary(max_size=40), method=st.sampled_from(["Probe", "ProbeFor", "Else"]))
@FUZZ
def test_messages_of_any_bytes(server: ControlServer, junk: bytes, method: str) -> None:
    with open_channel(server.address, JOB) as channel:
        call = channel.unary_unary(f"/bagua.v1.AgentControl/{method}")
        try:
            answer = call(junk, timeout=DEADLINE_S)
        except grpc.RpcError as error:
            assert error.code() is not grpc.StatusCode.DEADLINE_EXCEEDED
        else:
            reply = control_pb2.ProbeReply.FromString(answer)
            assert reply.verdict in (REFUSED, UNANSWERED), "it was asked about no agent"


@given(job_id=st.text(max_size=5), agent_id=st.text(max_size=5))
@FUZZ
def test_it_answers_for_its_own_job_and_agent_only(server: ControlServer, job_id: str, agent_id: str) -> None:
    expected = ALIVE if (job_id, agent_id) == ("job", "a") else REFUSED
    assert probe(replace(JOB, job_id=job_id), server.address, agent_id, DEADLINE_S).verdict == expected


ODD_ADDRESSES = [
    "",
    ":",
    "nowhere",
    "127.0.0.1:0",
    "127.0.0.1:99999999999999999999",
    "127.0.0.1:-1",
    "127.0.0.1:٣",
    "[::1",
    "unix:/etc/passwd:1",
    "dns:///127.0.0.1:1",
    "http://127.0.0.1:1",
    "a\x00b:1",
    "x" * 70000 + ":1",
    "..:1",
    "\N{SNOWMAN}.\N{SNOWMAN}:1",
]


@pytest.mark.parametrize("address", ODD_ADDRESSES)
def test_a_relay_to_no_address_proves_nothing(server: ControlServer, address: str) -> None:
    assert relay(server, address, 0.5).verdict == UNANSWERED
    check_alive(server)


@given(address=st.text(alphabet=":[]%/.0123456789abc\x00é", max_size=12))
@FUZZ
def test_a_relay_to_any_text_answers(server: ControlServer, address: str) -> None:
    assert relay(server, address, 0.05).verdict in (UNANSWERED, REFUSED)


@pytest.mark.parametrize("timeout_s", [math.nan, math.inf, -math.inf, -1.0, 0.0, 1e300, 1e-300])
def test_a_relay_with_any_time_limit_ends(
    server: ControlServer, listener: socket.socket, timeout_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control_server, "MOST_INDIRECT_TIMEOUT_S", 0.3)
    began_s = time.monotonic()
    assert relay(server, address_of(listener), timeout_s).verdict == UNANSWERED
    assert time.monotonic() - began_s < DEADLINE_S
    check_alive(server)


def test_a_relay_for_another_job_probes_no_agent(server: ControlServer, listener: socket.socket) -> None:
    """Else a client of one agent could use it to scan for open ports."""
    listener.setblocking(False)
    assert relay(server, address_of(listener), 0.5, job_id="another").verdict == UNANSWERED
    with pytest.raises(BlockingIOError):
        listener.accept()


def test_relays_that_wait_do_not_make_their_agent_look_dead(
    server: ControlServer, listener: socket.socket
) -> None:
    """Many silent agents are asked about through one helper at once; it must answer for itself meanwhile."""
    with ThreadPoolExecutor(40) as callers:
        waiting = [
            callers.submit(probe_through, JOB, server.address, address_of(listener), "b", 3.0)
            for _ in range(40)
        ]
        accepted = listener.accept()[0]  # the first of them is under way
        began_s = time.monotonic()
        check_alive(server, within_s=2.5)
        assert time.monotonic() - began_s < 2.5
        assert {w.result(DEADLINE_S).verdict for w in waiting} == {UNANSWERED}
        accepted.close()


@pytest.mark.parametrize("answer", [b"", b"\x08\x00", b"\x08\x63", b"\xff\xff"])
def test_an_answer_that_no_agent_gives_proves_nothing(answer: bytes) -> None:
    """Another version of us listens on the port."""

    class Other(grpc.GenericRpcHandler):  # type: ignore[misc]
        def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
            return grpc.unary_unary_rpc_method_handler(lambda request, context: answer)

    server = grpc.server(ThreadPoolExecutor(2))
    server.add_generic_rpc_handlers((Other(),))
    port = listen(server, "127.0.0.1:0", JOB)
    server.start()
    try:
        assert probe(JOB, f"127.0.0.1:{port}", "a", DEADLINE_S).verdict == UNANSWERED
        helped = probe_through(JOB, f"127.0.0.1:{port}", "127.0.0.1:1", "a", DEADLINE_S)
        assert helped.verdict == UNANSWERED
    finally:
        server.stop(0).wait(DEADLINE_S)


def test_a_silent_client_is_hung_up_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_identity, "_MS_FOR_A_HANDSHAKE", 300)
    server = ControlServer("127.0.0.1", JOB, "a", lambda: ["w0"])
    host, _, port = server.address.rpartition(":")
    try:
        with socket.create_connection((host, int(port)), timeout=DEADLINE_S) as stranger:
            assert stranger.recv(1) == b""
        check_alive(server)
    finally:
        server.stop()


def test_hundreds_of_connections(server: ControlServer) -> None:
    host, _, port = server.address.rpartition(":")
    silent: list[socket.socket] = []
    try:
        for _ in range(300):
            silent.append(socket.create_connection((host, int(port)), timeout=DEADLINE_S))
        check_alive(server)
    finally:
        for one in silent:
            one.close()
    check_alive(server)
