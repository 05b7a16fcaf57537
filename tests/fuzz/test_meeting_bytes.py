"""The store in which members meet, against strangers on its port; its client against a server that is none."""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bagua_core.communication.transports.meeting_store import (
    GENERATIONS_KEPT,
    MOST_QUESTIONS,
    MeetingServer,
    MeetingStore,
    MeetingStoreError,
)

HOST = "127.0.0.1"
DEADLINE_S = 10.0
FUZZ = settings(max_examples=80)


@pytest.fixture
def server() -> Iterator[MeetingServer]:
    made = MeetingServer(HOST)
    yield made
    made.close()
    assert not made._thread.is_alive()


def check_served(server: MeetingServer) -> None:
    store = MeetingStore(HOST, server.port, DEADLINE_S)
    store.set("job/1/all/0", b"x")
    other = MeetingStore(HOST, server.port, DEADLINE_S)
    assert other.get("job/1/all/0") == b"x"
    store.close()
    other.close()


def stranger(server: MeetingServer) -> socket.socket:
    return socket.create_connection((HOST, server.port), timeout=DEADLINE_S)


@given(junk=st.lists(st.binary(min_size=1, max_size=60), min_size=1, max_size=3))
@FUZZ
def test_any_bytes(server: MeetingServer, junk: list[bytes]) -> None:
    with stranger(server) as one:
        try:
            for piece in junk:
                one.sendall(piece)
        except OSError:
            pass  # it has hung up
    check_served(server)


@given(
    frames=st.lists(
        st.tuples(
            st.integers(0, 4),
            st.sampled_from([b"", b"k", b"job/1/all/9", b"/", b"\xff"]),
            st.binary(max_size=9),
        ),
        max_size=6,
    )
)
@FUZZ
def test_whole_frames_of_any_kind(server: MeetingServer, frames: list[tuple[int, bytes, bytes]]) -> None:
    """Asked twice for the same key, set while others wait, hung up on in between."""
    with stranger(server) as waiting, stranger(server) as one:
        waiting.sendall(struct.pack("!IBH", 1, 2, 1) + b"k")
        try:
            for operation, key, value in frames:
                one.sendall(struct.pack("!IBH", len(key) + len(value), operation, len(key)) + key + value)
        except OSError:
            pass  # it has hung up
    check_served(server)


@given(
    sets=st.lists(
        st.tuples(
            st.sampled_from([b"job", b"other", b"", b"\xff"]),
            st.integers(0, 40).map(lambda n: str(n).encode()) | st.sampled_from([b"", b"..", b"before-loop"]),
            st.sampled_from([b"all/0", b"lane/3", b"", b"/", b"x" * 100]),
        ),
        max_size=60,
    )
)
@settings(FUZZ, max_examples=40)
def test_groups_are_bounded_and_the_newest_are_kept(
    server: MeetingServer, sets: list[tuple[bytes, bytes, bytes]]
) -> None:
    """Whatever keys are set: a model of the groups says which are there. What the worker publishes is never lost."""
    server.publish({b"job/before-loop/parts": b"published"})
    kept: OrderedDict[bytes, dict[bytes, bytes]] = OrderedDict()
    for group in list(server._groups):
        kept[group] = dict(server._groups[group])  # of the examples before
    store = MeetingStore(HOST, server.port, DEADLINE_S)
    with stranger(server) as one:
        for number, (job, generation, rest) in enumerate(sets):
            key, value = b"/".join([job, generation, rest]), b"%d" % number
            one.sendall(struct.pack("!IBH", len(key) + len(value), 1, len(key)) + key + value)
            kept.setdefault(b"/".join([job, generation]), {})[key] = value
            if len(kept) > GENERATIONS_KEPT:
                kept.popitem(last=False)
        one.sendall(struct.pack("!IBH", 21, 2, 21) + b"job/before-loop/parts")
        assert one.recv(100).endswith(b"published"), "all before it was read"
    assert dict(server._groups) == dict(kept) and len(kept) <= GENERATIONS_KEPT
    assert store.get("job/before-loop/parts") == b"published"
    store.close()


def test_hundreds_of_connections(server: MeetingServer) -> None:
    silent = [stranger(server) for _ in range(300)]
    for one in silent[:100]:
        one.sendall(b"\x00\x00\x00\x05")  # half of a header
    check_served(server)
    for one in silent:
        one.close()
    check_served(server)


def test_a_client_that_does_not_read_is_hung_up_on(server: MeetingServer) -> None:
    """Each question costs it a few bytes and the server a megabyte; a hundred are too many."""
    big = b"x" * (1 << 20)
    size = len(b"g/k") + len(big) - 3
    with stranger(server) as one:
        one.sendall(struct.pack("!IBH", size, 1, 3) + b"g/k" + big[: size - 3])
        question = struct.pack("!IBH", 3, 2, 3) + b"g/k"
        one.settimeout(2.0)
        with pytest.raises(OSError):
            for _ in range(10):
                one.sendall(question * 10)
                threading.Event().wait(0.02)  # the server takes them one by one
    check_served(server)


def test_a_client_that_asks_for_what_is_not_there_on_and_on_is_hung_up_on(server: MeetingServer) -> None:
    question = struct.pack("!IBH", 3, 2, 3) + b"g/n"
    with stranger(server) as one:
        one.sendall(question * (MOST_QUESTIONS + 1))
        assert not one.recv(1), "it has hung up"
    check_served(server)


def test_waiters_that_do_not_read_are_hung_up_on_when_the_value_comes(server: MeetingServer) -> None:
    big = b"x" * ((1 << 20) - 3)
    with stranger(server) as waiting, stranger(server) as one:
        waiting.sendall((struct.pack("!IBH", 3, 2, 3) + b"g/w") * 500)
        check_served(server)  # its questions were read
        one.sendall(struct.pack("!IBH", len(big) + 3, 1, 3) + b"g/w" + big)
        one.sendall(struct.pack("!IBH", 3, 2, 3) + b"g/w")
        # It is answered in order: by now the waiters have been served what they took, which was nothing
        assert one.recv(1)
        taken = 0
        try:
            while data := waiting.recv(1 << 20):
                taken += len(data)
        except ConnectionError:
            pass  # it has hung up
        assert taken < 100 << 20
    check_served(server)


# -- the client


@pytest.fixture
def impostor() -> Iterator[socket.socket]:
    with socket.create_server((HOST, 0)) as listener:
        yield listener


def answering(listener: socket.socket, answer: bytes, *, again_s: float = 0.0) -> threading.Thread:
    """Answers the first caller; with again_s over and over, until it hangs up."""

    def serve() -> None:
        connection, _ = listener.accept()
        with connection:
            try:
                connection.sendall(answer)
                while again_s:
                    time.sleep(again_s)  # the impostor's own pace
                    connection.sendall(answer)
            except OSError:
                return

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    return thread


@given(answer=st.binary(max_size=60))
@FUZZ
def test_an_answer_of_any_bytes_is_one_error(impostor: socket.socket, answer: bytes) -> None:
    thread = answering(impostor, answer)
    store = MeetingStore(HOST, impostor.getsockname()[1], DEADLINE_S)
    with pytest.raises(MeetingStoreError):
        store.get("job/1/all/0")
    store.close()
    thread.join(DEADLINE_S)


def test_a_server_that_keeps_talking_does_not_hold_its_client(impostor: socket.socket) -> None:
    other = struct.pack("!IBH", 2, 3, 1) + b"kv"
    thread = answering(impostor, other, again_s=0.02)
    store = MeetingStore(HOST, impostor.getsockname()[1], 0.3)
    outcome: list[Exception] = []

    def ask() -> None:
        try:
            store.get("job/1/all/0")
        except MeetingStoreError as error:
            outcome.append(error)

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(3.0)
    store.interrupt()
    asking.join(DEADLINE_S)
    store.close()
    thread.join(DEADLINE_S)
    assert "job/1/all/0" in str(outcome[0]) and "closed" not in str(outcome[0]), "within its own time"
