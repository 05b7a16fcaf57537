"""The job output that a daemon serves, its permitted callers, and names and files that must not lead it elsewhere."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from bagua_agent.base.errors import UserError
from bagua_agent.security.certificate_files import TlsFiles, utc_now
from bagua_agent.security.grpc_security import channel_credentials
from bagua_agent.security.tls_renewal import RenewedTls
from bagua_agent.service.logs.job_logs import JobLogs
from bagua_agent.service.node.caller_limits import MOST_OF_A_CALLER, CallerLimits, TooManyReaders, caller_name
from bagua_agent.service.node.node_server import LEAST_ROLES, NodeServer
from bagua_contract import node_pb2, node_pb2_grpc
from tests.agent.service.conftest import People
from tests.lab.free_port import free_port
from tests.lab.wait import HANG_S, eventually

DEADLINE_S = 10.0
WORKER = "slot0-h1-abc.0.def"


@pytest.fixture
def log_dir(tmp_path: Path) -> Path:
    """A job's worker that has written, a secret beside it, and things that only look like logs."""
    folder = tmp_path / "log" / "demo" / "h1"
    (folder / WORKER).mkdir(parents=True)
    (folder / WORKER / "stdout.log").write_text("one\ntwo\n")
    (tmp_path / "secret").write_text("secret\n")
    trap = folder / "slot1-trap"
    trap.mkdir()
    (trap / "stdout.log").symlink_to(tmp_path / "secret")
    os.mkfifo(trap / "stderr.log")
    (folder / "slot2-elsewhere").symlink_to(tmp_path)
    return tmp_path / "log"


def read(logs: JobLogs, directory: str, *, stderr: bool = False, last_bytes: int = 0) -> bytes:
    return b"".join(
        piece.data
        for piece in logs.read(
            "demo", directory, stderr=stderr, last_bytes=last_bytes, goes_on=lambda wait_s: False
        )
    )


def test_files_are_listed_and_read(log_dir: Path) -> None:
    logs = JobLogs(log_dir, "h1")
    found = {f.directory: (f.stdout_bytes, f.stderr_bytes) for f in logs.list("demo")}
    assert found[WORKER] == (8, 0) and "slot2-elsewhere" not in found
    assert read(logs, WORKER) == b"one\ntwo\n"
    assert (
        read(logs, WORKER, last_bytes=4) == b"two\n" and read(logs, WORKER, last_bytes=100) == b"one\ntwo\n"
    )
    assert logs.list("never-here") == []


@pytest.mark.parametrize(
    "name", ["..", "../../secret", "slot0-/etc", "", "slot0-..", "x", "slot0-a\0", "slot2-elsewhere/.."]
)
def test_no_name_leads_elsewhere(log_dir: Path, name: str) -> None:
    with pytest.raises(UserError):
        read(JobLogs(log_dir, "h1"), name)


def test_no_file_leads_elsewhere_nor_holds_anybody(log_dir: Path) -> None:
    logs = JobLogs(log_dir, "h1")
    for stderr in (False, True):
        with pytest.raises(UserError):
            read(logs, "slot1-trap", stderr=stderr)
    for job_id in ("..", "a/b", "", "."):
        with pytest.raises(UserError, match="is not allowed"):
            logs.list(job_id)


def test_what_is_written_meanwhile_is_read_to_the_end(log_dir: Path) -> None:
    path = log_dir / "demo" / "h1" / WORKER / "stdout.log"
    looks: list[float] = []

    def goes_on(wait_s: float) -> bool:
        looks.append(wait_s)
        with path.open("a") as file:
            file.write(f"look {len(looks)}\n")
        return len(looks) < 2

    pieces = JobLogs(log_dir, "h1").read("demo", WORKER, stderr=False, last_bytes=0, goes_on=goes_on)
    assert b"".join(piece.data for piece in pieces) == b"one\ntwo\nlook 1\nlook 2\n"


class Daemon:
    def __init__(self, log_dir: Path, files: TlsFiles | None) -> None:
        self.address = f"127.0.0.1:{free_port()}"
        self.running = threading.Event()
        tls = None if files is None else RenewedTls(files)
        self.server = NodeServer(
            self.address, JobLogs(log_dir, "h1"), lambda job_id: self.running.is_set(), tls
        )

    def stub(self, files: TlsFiles | None) -> node_pb2_grpc.NodeServiceStub:
        options = [("grpc.use_local_subchannel_pool", 1)]
        if files is None:
            channel = grpc.insecure_channel(self.address, options)
        else:
            channel = grpc.secure_channel(self.address, channel_credentials(files, utc_now()), options)
        return node_pb2_grpc.NodeServiceStub(channel)


@pytest.fixture
def daemon(log_dir: Path, people: People) -> Iterator[Daemon]:
    made = Daemon(log_dir, people.files["node-1"])
    yield made
    made.server.stop()


def test_only_viewers_and_operators_read(daemon: Daemon, people: People) -> None:
    request = node_pb2.ReadLogRequest(job_id="demo", directory=WORKER, stream=node_pb2.ReadLogRequest.STDOUT)
    for name in ("ann", "vic"):
        stub = daemon.stub(people.files[name])
        listed = stub.ListLogs(node_pb2.ListLogsRequest(job_id="demo"), timeout=DEADLINE_S)
        assert WORKER in {w.directory for w in listed.workers}
        chunks = stub.ReadLog(request, timeout=DEADLINE_S)
        assert b"".join(chunk.data for chunk in chunks) == b"one\ntwo\n"
    for files in (None, people.trusting_us("stranger"), people.files["etcd-1"]):
        with pytest.raises((grpc.RpcError, UserError)):  # here already, or there
            list(daemon.stub(files).ReadLog(request, timeout=DEADLINE_S))
    served = {m.name for m in node_pb2.DESCRIPTOR.services_by_name["NodeService"].methods}
    assert {f"/bagua.v1.NodeService/{name}" for name in served} == set(LEAST_ROLES)


def test_a_reader_who_follows_is_let_go_when_the_unit_has_ended(daemon: Daemon, people: People) -> None:
    daemon.running.set()
    request = node_pb2.ReadLogRequest(
        job_id="demo", directory=WORKER, stream=node_pb2.ReadLogRequest.STDOUT, follow=True
    )
    chunks = daemon.stub(people.files["vic"]).ReadLog(request, timeout=DEADLINE_S)
    assert next(chunks).data == b"one\ntwo\n"
    daemon.running.clear()
    assert list(chunks) == []


def test_an_address_that_is_taken_is_said(log_dir: Path) -> None:
    first = Daemon(log_dir, None)
    try:
        with pytest.raises(UserError, match=r"can't be listened at; is listen\.port taken"):
            NodeServer(first.address, JobLogs(log_dir, "h1"), lambda job_id: False, None)
    finally:
        first.server.stop()


FOLLOWED = node_pb2.ReadLogRequest(
    job_id="demo", directory=WORKER, stream=node_pb2.ReadLogRequest.STDOUT, follow=True
)


def follow(daemon: Daemon, files: TlsFiles | None, streams: int) -> tuple[list[grpc.Future], list[str]]:
    """Streams that are being read, over several connections, and what was said to those that are not."""
    going, refused = [], []
    stubs = [daemon.stub(files) for _ in range(-(-streams // 50))]
    for n in range(streams):
        call = stubs[n // 50].ReadLog(FOLLOWED, timeout=HANG_S)
        try:
            assert next(call).data == b"one\ntwo\n"
            going.append(call)
        except grpc.RpcError as error:
            assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            refused.append(error.details() or "")
    return going, refused


def test_a_caller_that_follows_all_that_is_allowed_keeps_no_other_out(daemon: Daemon, people: People) -> None:
    daemon.running.set()
    going, refused = follow(daemon, people.files["vic"], MOST_OF_A_CALLER + 3)
    assert len(going) == MOST_OF_A_CALLER
    assert len(refused) == 3 and all(text.startswith("'vic' reads ") for text in refused)
    others, none = follow(daemon, people.files["ann"], 1)
    assert len(others) == 1 and none == []
    daemon.stub(people.files["vic"]).ListLogs(node_pb2.ListLogsRequest(job_id="demo"), timeout=DEADLINE_S)
    going[0].cancel()

    def has_room() -> bool:
        again, refused = follow(daemon, people.files["vic"], 1)
        return bool(again) and not refused

    eventually(has_room, DEADLINE_S, "a stream that ended makes room")


def test_a_place_is_given_back_however_reading_ends() -> None:
    limits = CallerLimits(most_of_a_caller=2, most=3)
    with limits.reading("ann"), limits.reading("ann"):
        with pytest.raises(TooManyReaders, match="'ann' reads 2 logs"), limits.reading("ann"):
            pass
        with limits.reading("vic"), pytest.raises(TooManyReaders, match="3 logs"), limits.reading("bob"):
            pass
        with pytest.raises(ZeroDivisionError), limits.reading("vic"):
            raise ZeroDivisionError
        with limits.reading("vic"):
            pass
    assert limits.callers == {}


@pytest.mark.parametrize(
    ("names", "peer", "caller"),
    [
        ([b"vic"], "ipv4:10.0.0.1:5000", "vic"),
        ([], "ipv4:10.0.0.1:5000", "ipv4:10.0.0.1"),
        ([], "ipv6:%5B::1%5D:5000", "ipv6:%5B::1%5D"),
        ([b"\xff"], "ipv4:10.0.0.1:5000", "\\xff"),
    ],
)
def test_a_caller_is_the_certificates_name_or_else_the_address(
    names: list[bytes], peer: str, caller: str
) -> None:
    assert caller_name({"x509_common_name": names} if names else {}, peer) == caller
