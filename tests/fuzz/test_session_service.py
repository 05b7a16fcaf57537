"""The agent's Unix socket against any client: strangers are turned away, expected workers served."""

from __future__ import annotations

import queue
import socket
import threading
from collections.abc import Callable, Iterator

import grpc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bagua_agent.rpc import session_server
from bagua_contract import session_pb2
from bagua_contract.records import PROTOCOL_VERSION
from tests.core.elastic.agents import Agent
from tests.lab.wait import eventually

DEADLINE_S = 10.0
METHOD = "/bagua.v1.WorkerSession/Attach"
FUZZ = settings(max_examples=40)


class Stranger:
    """A stream whose messages are bytes of the test's choice."""

    def __init__(self, path: str, largest_bytes: int = -1) -> None:
        self._outbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self.channel = grpc.insecure_channel(
            f"unix:{path}",
            options=[("grpc.max_send_message_length", largest_bytes), ("grpc.use_local_subchannel_pool", 1)],
        )
        self.stream = self.channel.stream_stream(METHOD)(iter(self._outbox.get, None), wait_for_ready=True)

    def say(self, *messages: bytes | session_pb2.WorkerMessage) -> None:
        for message in messages:
            self._outbox.put(message if isinstance(message, bytes) else message.SerializeToString())

    def hang_up(self) -> None:
        self._outbox.put(None)
        self.channel.close()

    def hear(self) -> session_pb2.AgentMessage:
        return session_pb2.AgentMessage.FromString(next(self.stream))

    def ending(self) -> grpc.StatusCode:
        """How the agent ends the stream, whatever it says before."""
        ended = threading.Event()
        if not self.stream.add_callback(ended.set):
            ended.set()  # it ended before
        assert ended.wait(DEADLINE_S), "the agent goes on listening"
        code: grpc.StatusCode = self.stream.code()
        return code


def hello(worker_id: str, protocol: int = PROTOCOL_VERSION) -> session_pb2.WorkerMessage:
    return session_pb2.WorkerMessage(hello=session_pb2.Hello(protocol=protocol, worker_id=worker_id, pid=1))


@pytest.fixture
def agent() -> Iterator[Agent]:
    agent = Agent("w0", "w1")
    yield agent
    agent.close()


@pytest.fixture
def call(agent: Agent) -> Iterator[Callable[..., Stranger]]:
    strangers: list[Stranger] = []

    def make(*messages: bytes | session_pb2.WorkerMessage) -> Stranger:
        strangers.append(Stranger(agent.socket))
        strangers[-1].say(*messages)
        return strangers[-1]

    yield make
    for stranger in strangers:
        stranger.hang_up()


def check_served(agent: Agent, worker_id: str = "w1") -> None:
    """A worker that is expected comes, is welcomed, is heard, and goes."""
    before = len(agent.said_by(worker_id))
    worker = Stranger(agent.socket)
    try:
        worker.say(hello(worker_id), session_pb2.WorkerMessage(entered=session_pb2.Entered(generation=1)))
        assert worker.hear().welcome.nonce == "nonce-1"
        agent.wait_for(lambda: len(agent.said_by(worker_id)) >= before + 2)
    finally:
        ended = agent.ended.count(worker_id)
        worker.hang_up()
        agent.wait_for(lambda: agent.ended.count(worker_id) > ended)


@pytest.mark.parametrize(
    "junk", [b"\xff" * 1000, b"GET / HTTP/1.1\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\xff"]
)
def test_bytes_that_are_no_grpc(agent: Agent, junk: bytes) -> None:
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.connect(agent.socket)
        stranger.sendall(junk)
        check_served(agent)
    check_served(agent)


@given(first=st.binary(max_size=50))
@FUZZ
def test_a_first_message_of_any_bytes_opens_no_session(agent: Agent, first: bytes) -> None:
    stranger = Stranger(agent.socket)
    try:
        stranger.say(first)
        assert stranger.ending() is not grpc.StatusCode.OK
    finally:
        stranger.hang_up()
    assert agent.said_by("w0") == []


@given(messages=st.lists(st.binary(max_size=30), min_size=1, max_size=3))
@settings(FUZZ, max_examples=20)
def test_later_messages_of_any_bytes_end_at_most_their_session(agent: Agent, messages: list[bytes]) -> None:
    ended = len(agent.ended)
    worker = Stranger(agent.socket)
    try:
        worker.say(hello("w0"))
        assert worker.hear().welcome.nonce
        worker.say(*messages)
    finally:
        worker.hang_up()
    agent.wait_for(lambda: len(agent.ended) > ended)


@pytest.mark.parametrize(
    "first",
    [
        session_pb2.WorkerMessage(),
        session_pb2.WorkerMessage(training_done=session_pb2.TrainingDone(generation=1, step=1)),
        session_pb2.WorkerMessage(ready=session_pb2.Ready(store_address="h:1")),
        hello(""),
        hello("w0\x00"),
        hello("../w0"),
        hello("x" * 100_000),
        hello("w0", protocol=2**32 - 1),
    ],
)
def test_a_first_message_that_names_no_expected_worker(
    agent: Agent, call: Callable[..., Stranger], first: session_pb2.WorkerMessage
) -> None:
    assert call(first).ending() in (
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.PERMISSION_DENIED,
        grpc.StatusCode.FAILED_PRECONDITION,
    )
    assert agent.said_by("w0") == []
    check_served(agent)


def test_another_worker_cannot_take_over_a_session(agent: Agent, call: Callable[..., Stranger]) -> None:
    worker = call(hello("w0"))
    assert worker.hear().welcome.nonce
    assert call(hello("w0")).ending() is grpc.StatusCode.PERMISSION_DENIED
    agent.server.tell_close()
    assert worker.hear().HasField("close"), "the first one's session stands"


def test_a_second_hello_in_a_session_names_no_other_worker(
    agent: Agent, call: Callable[..., Stranger]
) -> None:
    worker = call(hello("w0"), hello("w1"), session_pb2.WorkerMessage(left=session_pb2.Left(generation=9)))
    assert worker.hear().welcome.nonce
    agent.wait_for(lambda: len(agent.said_by("w0")) == 3)
    assert agent.said_by("w1") == []


def test_a_worker_that_has_ended_is_expected_no_more(agent: Agent, call: Callable[..., Stranger]) -> None:
    worker = call(hello("w0"))
    assert worker.hear().welcome.nonce
    agent.server.forget("w0")
    assert worker.ending() is grpc.StatusCode.OK
    assert call(hello("w0")).ending() is grpc.StatusCode.PERMISSION_DENIED


def test_a_huge_message_ends_its_session_and_is_not_passed_on(
    agent: Agent, call: Callable[..., Stranger]
) -> None:
    """etcd takes at most 1.5 MB in a request; what is passed on has to fit."""
    worker = call(hello("w0"))
    assert worker.hear().welcome.nonce
    for_etcd = session_pb2.Ready(store_address="h:1", fingerprint={"model": "x" * (2 << 20)})
    worker.say(session_pb2.WorkerMessage(ready=for_etcd))
    assert worker.ending() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert [m.WhichOneof("kind") for m in agent.said_by("w0")] == ["hello"]
    check_served(agent)


def test_hundreds_who_say_nothing_keep_no_worker_out(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half-open streams, more than there are threads for at two workers."""
    monkeypatch.setattr(session_server, "FIRST_MESSAGE_TIMEOUT_S", 1.0)
    channel = grpc.insecure_channel(f"unix:{agent.socket}")
    silent: list[queue.SimpleQueue[bytes | None]] = [queue.SimpleQueue() for _ in range(300)]
    streams = [
        channel.stream_stream(METHOD)(iter(outbox.get, None), wait_for_ready=True) for outbox in silent
    ]
    try:
        check_served(agent)
        for stream in streams:
            eventually(lambda s=stream: not s.is_active(), DEADLINE_S, "a silent stream is ended")
        assert {stream.code() for stream in streams} == {grpc.StatusCode.CANCELLED}
    finally:
        for outbox in silent:
            outbox.put(None)
        channel.close()
    check_served(agent, "w0")


def test_hundreds_of_connections_that_say_nothing(agent: Agent) -> None:
    silent = [socket.socket(socket.AF_UNIX) for _ in range(300)]
    try:
        for one in silent:
            one.connect(agent.socket)
        check_served(agent)
    finally:
        for one in silent:
            one.close()
    check_served(agent)


def test_a_session_that_comes_and_goes_leaves_no_thread(agent: Agent) -> None:
    check_served(agent)

    def readers() -> int:
        return sum(t.name == "bagua-session-in" for t in threading.enumerate())

    for _ in range(20):
        check_served(agent)
    eventually(lambda: readers() == 0, DEADLINE_S, "the readers end with their streams")
