"""Alive, certainly gone, or silent: asked of real processes on loopback."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest

from bagua_agent.job.new_identity import make_identity
from bagua_agent.rpc.control_client import probe, probe_through
from bagua_agent.rpc.control_server import ControlServer
from bagua_agent.rpc.job_identity import JobIdentity
from bagua_contract import control_pb2, control_pb2_grpc
from tests.lab.wait import HANG_S

ALIVE = control_pb2.ProbeReply.ALIVE
REFUSED = control_pb2.ProbeReply.REFUSED
UNANSWERED = control_pb2.ProbeReply.UNANSWERED
WINDOW_S = 0.5
GENEROUS_S = 10.0  # for answers that must come, however busy the machine
# The window bounds the question; what a busy machine adds to it is no promise.
SLACK_S = 3.0

JOB = make_identity("job")

AGENT = """
import sys, time
from bagua_agent.rpc.control_server import ControlServer
from bagua_agent.rpc.job_identity import JobIdentity
identity = JobIdentity.decode("job", sys.argv[2].encode())
server = ControlServer("127.0.0.1", identity, sys.argv[1], lambda: ["w0", "w1"])
print(server.address, flush=True)
time.sleep(100)
"""


class AgentProcess:
    def __init__(self, agent_id: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", AGENT, agent_id, JOB.encode().decode()],
            cwd=Path(__file__).parents[3],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        self.address = self._process.stdout.readline().strip()

    def freeze(self) -> None:
        self._process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self._process.pid, os.WSTOPPED | os.WNOWAIT)

    def kill(self) -> None:
        self._process.kill()
        self._process.communicate(timeout=HANG_S)


@pytest.fixture
def start_agent() -> Iterator[Callable[[str], AgentProcess]]:
    started: list[AgentProcess] = []

    def start(agent_id: str) -> AgentProcess:
        started.append(AgentProcess(agent_id))
        return started[-1]

    yield start
    for process in started:
        process.kill()


@pytest.fixture
def control() -> Iterator[ControlServer]:
    server = ControlServer("127.0.0.1", JOB, "helper", lambda: ["w7"])
    yield server
    server.stop()


def timed(ask: Callable[[], control_pb2.ProbeReply]) -> tuple[int, float]:
    began_s = time.monotonic()
    return ask().verdict, time.monotonic() - began_s


def test_an_agent_that_lives_says_so_and_names_its_workers(control: ControlServer) -> None:
    reply = probe(JOB, control.address, "helper", GENEROUS_S)
    assert (reply.verdict, list(reply.workers)) == (ALIVE, ["w7"])


def test_an_agent_whose_loop_is_stuck_counts_as_one_that_does_not_answer() -> None:
    stuck = [True]
    made = ControlServer("127.0.0.1", JOB, "a", lambda: ["w0"], is_stuck=lambda: stuck[0])
    try:
        reply = probe(JOB, made.address, "a", GENEROUS_S)
        assert (reply.verdict, list(reply.workers)) == (UNANSWERED, [])
        assert probe_through(JOB, made.address, made.address, "a", GENEROUS_S).verdict == UNANSWERED
        stuck[0] = False
        assert probe(JOB, made.address, "a", GENEROUS_S).verdict == ALIVE
    finally:
        made.stop()


def test_another_agent_at_its_address_is_proof_that_it_is_gone(control: ControlServer) -> None:
    assert probe(JOB, control.address, "somebody", GENEROUS_S).verdict == REFUSED
    other_name = JobIdentity("another", JOB.certificate, JOB.key)
    assert probe(other_name, control.address, "helper", GENEROUS_S).verdict == REFUSED


def test_an_agent_of_another_job_proves_nothing_and_learns_nothing(control: ControlServer) -> None:
    """Not even to one who knows job and agent by name."""
    stranger = make_identity("job")
    assert probe(stranger, control.address, "helper", GENEROUS_S).verdict == UNANSWERED
    assert (
        probe_through(stranger, control.address, control.address, "helper", GENEROUS_S).verdict == UNANSWERED
    )
    impostor = ControlServer("127.0.0.1", stranger, "helper", lambda: [])
    try:
        assert probe(stranger, impostor.address, "helper", GENEROUS_S).verdict == ALIVE, (
            "it does answer its own"
        )
        assert probe(JOB, impostor.address, "helper", GENEROUS_S).verdict == UNANSWERED
    finally:
        impostor.stop()


@pytest.mark.parametrize("how", ["plain", "without a certificate"])
def test_without_the_jobs_key_there_is_no_connection(control: ControlServer, how: str) -> None:
    channel = (
        grpc.insecure_channel(control.address)
        if how == "plain"
        else grpc.secure_channel(
            control.address,
            grpc.ssl_channel_credentials(JOB.certificate),
            options=[("grpc.ssl_target_name_override", "agents.bagua.internal")],
        )
    )
    with channel, pytest.raises(grpc.RpcError) as refused:
        control_pb2_grpc.AgentControlStub(channel).Probe(  # type: ignore[no-untyped-call]
            control_pb2.ProbeRequest(job_id="job", agent_id="helper"), timeout=GENEROUS_S
        )
    assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
    assert probe(JOB, control.address, "helper", GENEROUS_S).verdict == ALIVE


def test_a_killed_agent_is_refused_at_once(start_agent: Callable[[str], AgentProcess]) -> None:
    agent = start_agent("a")
    assert probe(JOB, agent.address, "a", GENEROUS_S).verdict == ALIVE
    agent.kill()
    verdict, took_s = timed(lambda: probe(JOB, agent.address, "a", GENEROUS_S))
    assert verdict == REFUSED
    assert took_s < SLACK_S, "proof need not wait for the window"


def test_a_frozen_agent_is_unanswered_within_the_window(start_agent: Callable[[str], AgentProcess]) -> None:
    """Its kernel still accepts the connection, so only the missing answer tells."""
    agent = start_agent("a")
    agent.freeze()
    verdict, took_s = timed(lambda: probe(JOB, agent.address, "a", WINDOW_S))
    assert verdict == UNANSWERED
    assert WINDOW_S * 0.9 <= took_s < WINDOW_S + SLACK_S


def test_a_silent_host_is_unanswered_within_the_window() -> None:
    """A listener whose queue is full: the kernel drops further connections without a word."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        fill = [socket.socket() for _ in range(4)]
        try:
            for each in fill:
                each.setblocking(False)
                each.connect_ex(listener.getsockname())
            verdict, took_s = timed(lambda: probe(JOB, address, "a", WINDOW_S))
        finally:
            for each in fill:
                each.close()
    assert verdict == UNANSWERED
    assert took_s < WINDOW_S + SLACK_S


def test_something_that_speaks_no_grpc_is_unanswered() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            for _ in range(2):
                connection, _ = listener.accept()
                with connection:
                    connection.sendall(b"220 mail.example ESMTP\r\n")

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        verdict, took_s = timed(lambda: probe(JOB, address, "a", WINDOW_S))
        thread.join(5)
    assert verdict == UNANSWERED
    assert took_s < WINDOW_S + SLACK_S


@pytest.mark.parametrize(
    "address",
    [
        "",
        "nonsense",
        "127.0.0.1:",
        "127.0.0.1:x",
        "127.0.0.1:99999",
        "127.0.0.1:0",
        ":1",
        f"{'x' * 300}:1",
        "no-such-host.invalid:1",
    ],
)
def test_an_address_that_is_none_is_unanswered(address: str) -> None:
    """It stands in a key that others wrote: a corrupted one must not stop the leader."""
    assert probe(JOB, address, "a", WINDOW_S).verdict == UNANSWERED
    assert probe_through(JOB, address, address, "a", WINDOW_S).verdict == UNANSWERED


# -- through another agent


def test_another_agent_tells_who_lives_and_who_is_gone(
    control: ControlServer, start_agent: Callable[[str], AgentProcess]
) -> None:
    agent = start_agent("a")

    def ask(agent_id: str) -> control_pb2.ProbeReply:
        return probe_through(JOB, control.address, agent.address, agent_id, GENEROUS_S)

    assert ask("a").verdict == ALIVE
    assert list(ask("a").workers) == ["w0", "w1"]
    assert ask("b").verdict == REFUSED
    agent.kill()
    assert ask("a").verdict == REFUSED


def test_a_frozen_agent_is_unanswered_through_another_too(
    control: ControlServer, start_agent: Callable[[str], AgentProcess]
) -> None:
    agent = start_agent("a")
    agent.freeze()
    verdict, took_s = timed(lambda: probe_through(JOB, control.address, agent.address, "a", WINDOW_S))
    assert verdict == UNANSWERED
    assert took_s < WINDOW_S + SLACK_S


@pytest.mark.parametrize("what", ["frozen", "killed"])
def test_a_helper_that_is_gone_proves_nothing(
    control: ControlServer, start_agent: Callable[[str], AgentProcess], what: str
) -> None:
    helper = start_agent("h")
    helper.freeze() if what == "frozen" else helper.kill()
    verdict, took_s = timed(lambda: probe_through(JOB, helper.address, control.address, "helper", WINDOW_S))
    assert verdict == UNANSWERED
    assert took_s < WINDOW_S + SLACK_S


def test_proxies_of_the_environment_are_not_for_agents(
    control: ControlServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "https_proxy", "grpc_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    assert probe(JOB, control.address, "helper", GENEROUS_S).verdict == ALIVE
