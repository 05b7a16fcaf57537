"""A worker floods its agent: it is read slowly, and the agent ends its session at once all the same."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import grpc

from bagua_contract import session_pb2, session_pb2_grpc
from bagua_contract.records import PROTOCOL_VERSION
from tests.core.elastic.agents import Agent

MESSAGES = 40


def test_a_flood_waits_in_the_workers_own_stream() -> None:
    agent = Agent("w0", slots=1)
    sent = 0

    def flood() -> Iterator[session_pb2.WorkerMessage]:
        nonlocal sent
        hello = session_pb2.Hello(protocol=PROTOCOL_VERSION, worker_id="w0", pid=1)
        yield session_pb2.WorkerMessage(hello=hello)
        for number in range(MESSAGES):
            fingerprint = {str(number): "x" * 900_000}
            yield session_pb2.WorkerMessage(ready=session_pb2.Ready(fingerprint=fingerprint))
            sent += 1

    with grpc.insecure_channel(f"unix:{agent.socket}") as channel:
        stream = session_pb2_grpc.WorkerSessionStub(channel).Attach(flood())  # type: ignore[no-untyped-call]
        reader = threading.Thread(target=lambda: _read_out(stream))
        reader.start()
        agent.wait_for(lambda: len(agent._heard) >= 3)  # the burst that is free
        until_s = time.monotonic() + 3.0
        while time.monotonic() < until_s and len(agent.said_by("w0")) <= 3:
            time.sleep(0.05)  # for what must not happen
        assert len(agent.said_by("w0")) <= 3 and sent < MESSAGES
        began_s = time.monotonic()
        agent.close()
        assert time.monotonic() - began_s < 5.0
        reader.join(10.0)
        assert not reader.is_alive()


def _read_out(stream: Iterator[session_pb2.AgentMessage]) -> None:
    try:
        for _ in stream:
            pass
    except grpc.RpcError:
        pass
