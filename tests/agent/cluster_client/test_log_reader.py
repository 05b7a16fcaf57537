"""Reading a job's output: bounded by silence, whatever its length, and over a daemon's restart without a gap."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import grpc
import pytest

from bagua_agent.base.errors import InfrastructureLost
from bagua_agent.cluster.cluster_records import PROTOCOL
from bagua_agent.cluster_client import log_reader
from bagua_agent.cluster_client.log_reader import (
    MOST_FAILURES,
    SILENCE_S,
    LogReader,
    Next,
    Tail,
    WorkerOutput,
    is_followed,
    last_workers,
    next_of,
)
from bagua_agent.etcd import cluster_keys
from bagua_agent.etcd.client import Store
from bagua_agent.service.logs.job_logs import JobLogs
from bagua_agent.service.node.node_server import NodeServer
from bagua_agent.workers.output.log_file import LogFile
from bagua_contract import cluster_pb2, node_pb2, node_pb2_grpc
from tests.lab.free_port import free_port
from tests.lab.wait import eventually

DEADLINE_S = 20.0
WORKER = "slot0-h1-abc.0.def"
OUTPUT = WorkerOutput("h1", WORKER, 0)


class Etcd:
    """A job that runs on one node."""

    def __init__(self, address: str) -> None:
        node = cluster_pb2.Node(protocol=PROTOCOL, node_name="h1", address=address)
        self.stands = {
            cluster_keys.node("h1"): node.SerializeToString(),
            cluster_keys.node("h2"): b"\xffwritten by a stranger",
            cluster_keys.submission("demo"): b"",
        }

    def get(self, key: str) -> SimpleNamespace | None:
        return SimpleNamespace(key=key, value=self.stands[key]) if key in self.stands else None

    def get_prefix(self, prefix: str) -> tuple[list[SimpleNamespace], int]:
        found = [SimpleNamespace(key=k, value=v) for k, v in self.stands.items() if k.startswith(prefix)]
        return found, 1


@pytest.fixture
def no_thread_left() -> Iterator[None]:
    yield
    for thread in threading.enumerate():
        if thread.name == "bagua-log":
            thread.join(DEADLINE_S)
            assert not thread.is_alive()


class Slow(node_pb2_grpc.NodeServiceServicer):
    """Sends a line a given number of times, and then nothing."""

    def __init__(self) -> None:
        self.over = threading.Event()
        self.lines = 0
        self.pause_s = 0.0

    def ReadLog(
        self, request: node_pb2.ReadLogRequest, context: grpc.ServicerContext
    ) -> Iterator[node_pb2.LogChunk]:
        for number in range(self.lines):
            yield node_pb2.LogChunk(data=f"line {number}\n".encode())
            self.over.wait(self.pause_s)
        if not self.pause_s:
            self.over.wait(DEADLINE_S)


@pytest.fixture
def slow(no_thread_left: None) -> Iterator[tuple[Slow, LogReader]]:
    servicer = Slow()
    server = grpc.server(ThreadPoolExecutor(4))
    node_pb2_grpc.add_NodeServiceServicer_to_server(servicer, server)  # type: ignore[no-untyped-call]
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    reader = LogReader(cast(Store, Etcd(f"127.0.0.1:{port}")), "demo", None)
    yield servicer, reader
    servicer.over.set()
    reader.close()
    server.stop(0).wait(DEADLINE_S)


def test_a_long_stream_is_read_to_its_end(
    slow: tuple[Slow, LogReader], monkeypatch: pytest.MonkeyPatch
) -> None:
    servicer, reader = slow
    monkeypatch.setattr(log_reader, "SILENCE_S", 1.0)
    monkeypatch.setattr(log_reader, "CALL_TIMEOUT_S", 1.0)
    servicer.lines, servicer.pause_s = 10, 0.15
    assert list(reader.lines(OUTPUT, "out", 0, print)) == [f"line {n}" for n in range(10)]


def test_a_silent_stream_is_given_up(slow: tuple[Slow, LogReader], monkeypatch: pytest.MonkeyPatch) -> None:
    servicer, reader = slow
    monkeypatch.setattr(log_reader, "SILENCE_S", 0.5)
    servicer.lines = 2
    read = []
    with pytest.raises(InfrastructureLost, match=r"h1 has sent nothing for 0\.5 s"):
        for line in reader.lines(OUTPUT, "out", 0, print):
            read.append(line)
    assert read == ["line 0", "line 1"]


def test_a_reader_that_stops_early_leaves_nothing(slow: tuple[Slow, LogReader]) -> None:
    servicer, reader = slow
    servicer.lines = 1000
    lines = reader.lines(OUTPUT, "out", 0, print)
    assert next(lines) == "line 0"
    cast("Iterator[str]", lines).close()  # type: ignore[attr-defined]


class Fast(node_pb2_grpc.NodeServiceServicer):
    """One worker that has written more than a terminal shows."""

    CHUNK = b"x" * 1023 + b"\n"
    CHUNKS = 1024

    def __init__(self) -> None:
        self.sent = 0
        self.all_sent = threading.Event()

    def ListLogs(
        self, request: node_pb2.ListLogsRequest, context: grpc.ServicerContext
    ) -> node_pb2.ListLogsReply:
        written = node_pb2.WorkerLogs(directory=WORKER, stdout_bytes=self.CHUNKS * 64 * 1024)
        return node_pb2.ListLogsReply(workers=[written])

    def ReadLog(
        self, request: node_pb2.ReadLogRequest, context: grpc.ServicerContext
    ) -> Iterator[node_pb2.LogChunk]:
        for _ in range(self.CHUNKS):
            yield node_pb2.LogChunk(data=self.CHUNK * 64)
            self.sent += 1
        self.all_sent.set()


def test_a_node_that_is_faster_than_the_terminal_waits_and_nothing_is_lost(
    no_thread_left: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_reader, "LOOK_S", 0.1)
    # The terminal is slow, not the node: it is not broken off
    monkeypatch.setattr(log_reader, "SILENCE_S", 0.3)
    servicer = Fast()
    server = grpc.server(ThreadPoolExecutor(4))
    node_pb2_grpc.add_NodeServiceServicer_to_server(servicer, server)  # type: ignore[no-untyped-call]
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    etcd = Etcd(f"127.0.0.1:{port}")
    etcd.stands[cluster_keys.outcome("demo")] = cluster_pb2.JobOutcome().SerializeToString()
    reader = LogReader(cast(Store, etcd), "demo", None)
    lines, complaints = [], []
    held_back = []

    def show(output: WorkerOutput, line: str) -> None:
        if not lines:  # a terminal that shows nothing for a while
            held_back.append(not servicer.all_sent.wait(3.0))
        lines.append(line)

    try:
        reader.follow(lambda output: True, ("out",), show, complaints.append)
    finally:
        reader.close()
        server.stop(0).wait(DEADLINE_S)
    assert held_back == [True], "the node sent 64 MiB to a terminal that shows nothing"
    assert len(lines) == Fast.CHUNKS * 64
    assert not complaints


class Followed:
    """A daemon that can be ended and started again, and a reader that follows its job in a thread."""

    def __init__(self, log_dir: Path) -> None:
        self.log_dir = log_dir
        self.file = log_dir / "demo" / "h1" / WORKER / "stdout.log"
        self.file.parent.mkdir(parents=True)
        self.file.write_bytes(b"")
        self.address = f"127.0.0.1:{free_port()}"
        self.etcd = Etcd(self.address)
        self.told: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.complaints: list[str] = []
        self.runs = True
        self.server: NodeServer | None = None
        self.start()
        self.reader = LogReader(cast(Store, self.etcd), "demo", None)
        self.thread = threading.Thread(target=self._follow)
        self.thread.start()

    def _follow(self) -> None:
        self.reader.follow(
            lambda output: True,
            ("out",),
            lambda output, line: self.told.put(line),
            self.complaints.append,
        )

    def start(self) -> None:
        self.server = NodeServer(self.address, JobLogs(self.log_dir, "h1"), lambda job_id: self.runs, None)

    def stop(self) -> None:
        assert self.server is not None
        self.server.stop()
        self.server = None

    def write(self, text: str) -> None:
        with self.file.open("a") as file:
            file.write(text)

    def hear(self) -> str:
        return self.told.get(timeout=DEADLINE_S)

    def end(self) -> None:
        self.runs = False
        self.etcd.stands[cluster_keys.outcome("demo")] = cluster_pb2.JobOutcome().SerializeToString()
        self.thread.join(DEADLINE_S)
        assert not self.thread.is_alive()
        self.reader.close()
        if self.server is not None:
            self.stop()


@pytest.fixture
def followed(tmp_path: Path, no_thread_left: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Followed]:
    monkeypatch.setattr(log_reader, "LOOK_S", 0.1)
    made = Followed(tmp_path)
    yield made
    made.end()


def test_a_stream_goes_on_where_it_broke(followed: Followed) -> None:
    followed.write("one\nhalf ")
    assert followed.hear() == "one"
    followed.stop()
    followed.write("a line\nwhile away\n")
    eventually(lambda: followed.complaints, DEADLINE_S, "the reader sees that the daemon is away")
    followed.start()
    assert [followed.hear(), followed.hear()] == ["half a line", "while away"]
    followed.write("last")
    followed.end()
    assert followed.hear() == "last" and followed.told.empty()


def test_a_stream_goes_on_across_rotations_and_says_what_is_not_kept(followed: Followed) -> None:
    file = LogFile(followed.file, most_bytes=2000)
    try:
        # The reader keeps up: nothing is missing, whatever is removed behind it
        for number in range(0, 500, 20):
            lines = [f"line {n}" for n in range(number, number + 20)]
            file.write("".join(line + "\n" for line in lines).encode())
            assert [followed.hear() for _ in lines] == lines
        assert not followed.complaints
        followed.stop()
        for number in range(500, 1000):
            file.write(f"line {number}\n".encode())
        followed.start()
        first = int(followed.hear().removeprefix("line "))
        rest = [followed.hear() for _ in range(first + 1, 1000)]
        assert 700 < first < 950 and rest == [f"line {n}" for n in range(first + 1, 1000)]
        gap = sum(len(f"line {n}\n") for n in range(500, first))
        assert [c for c in followed.complaints if f"h1:{WORKER}: {gap} bytes of its output are not kept" in c]
    finally:
        file.close()


def test_what_is_silent_though_there_is_more_is_broken_off_and_opened_again() -> None:
    tail = Tail(OUTPUT)
    assert next_of(tail, 100.0) is Next.NOTHING
    tail.size_bytes = 8
    assert next_of(tail, 100.0) is Next.OPEN
    tail.call, tail.heard_s = object(), 100.0
    assert next_of(tail, 100.0 + SILENCE_S - 0.1) is Next.NOTHING
    assert next_of(tail, 100.0 + SILENCE_S) is Next.BREAK
    assert tail.take(node_pb2.LogChunk(data=b"one\ntwo\n"), 120.0) == ["one", "two"]
    assert next_of(tail, 1e9) is Next.NOTHING, "all is read: it may be silent for ever"


def test_an_ended_job_is_not_waited_for_without_end() -> None:
    tail = Tail(OUTPUT, size_bytes=8)
    assert tail.is_due
    tail.failed = MOST_FAILURES
    assert not tail.is_due and next_of(tail, 100.0) is Next.OPEN


@pytest.mark.parametrize(
    ("directory", "rank", "asked", "shown"),
    [
        ("new", None, None, True),  # replaced before anybody saw its rank
        ("old", None, None, False),
        ("old", 1, None, True),
        ("new", None, 1, False),
        ("new", 1, 1, True),
        ("new", 2, 1, False),
    ],
)
def test_who_is_followed(directory: str, rank: int | None, asked: int | None, shown: bool) -> None:
    assert is_followed(WorkerOutput("h1", directory, rank), asked, {("h1", "old")}) is shown


def test_of_an_ended_job_the_last_workers_of_every_node_are_shown() -> None:
    ranked, replaced = WorkerOutput("h1", "slot0-b", 0), WorkerOutput("h1", "slot0-a", None)
    left_0, left_1 = WorkerOutput("h2", "slot0-d", None), WorkerOutput("h2", "slot1-e", None)
    earlier = WorkerOutput("h2", "slot0-c", None)
    assert last_workers([ranked, replaced, earlier, left_0, left_1]) == [ranked, left_0, left_1]
    assert last_workers([]) == []
