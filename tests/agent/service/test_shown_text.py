"""Every command shows text from others as plain text and colours on its terminal."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from bagua_agent.cluster.cluster_records import PROTOCOL
from bagua_agent.etcd import cluster_keys
from bagua_agent.etcd.client import Store
from bagua_agent.etcd.keys import JobKeys
from bagua_agent.etcd.server.embedded import EmbeddedEtcd
from bagua_agent.service.logs.job_logs import JobLogs
from bagua_agent.service.node.node_server import NodeServer
from bagua_agent.workers.output.log_layout import LogLayout, path_component
from bagua_contract import cluster_pb2 as pb
from bagua_contract import membership_pb2
from bagua_contract.records import Generation, GenerationKind, Placement
from bagua_launch.main import cli
from tests.agent.cluster_state.test_odd_records import submission
from tests.lab.free_port import free_port

EVIL = "\x1b]0;title\x07\x1b[2J\x9b2J\u202e\x1b[31mred"
SHOWN = r"\x1b]0;title\x07\x1b[2J\x9b2J\u202e" + "\x1b[31mred"
ACTED_ON = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
WORKER = "a.0.w"


@pytest.fixture
def cluster(plain_etcd: EmbeddedEtcd, plain_store: Store, tmp_path: Path) -> Iterator[str]:
    """Endpoint of a cluster in which every text for people is hostile."""
    address = f"127.0.0.1:{free_port()}"
    layout = LogLayout(tmp_path, "demo", "n0")
    folder = layout.node_directory / f"slot0-{path_component(WORKER)}"
    folder.mkdir(parents=True)
    (folder / "stdout.log").write_bytes(f"{EVIL}\n10%\r20%\r\n".encode())
    (folder / "stderr.log").write_bytes(b"\xff\x1b[1A\n")
    keys = JobKeys("demo")
    member = Placement(WORKER, "a", "n0", 0, 0, 0, 0, "127.0.0.1:1", 1, 1, True)
    record = Generation(1, 0, GenerationKind.PLANNED, (member,), "nonce", EVIL)
    event = membership_pb2.Event(kind=membership_pb2.Event.JOB_CREATED, node_name=EVIL, text=EVIL)
    unit = pb.Unit(job_id="demo", state=pb.Unit.REFUSED, reason=EVIL)
    node = pb.Node(
        protocol=PROTOCOL, node_name="n0", address=address, slots=1, troubles=[EVIL], units=[unit],
        labels={EVIL: EVIL}, version=EVIL,
    )  # fmt: skip
    outcome = pb.JobOutcome(outcome=pb.JobOutcome.FAILED, exit_code=1, reason=EVIL)
    for key, value in {
        keys.generation: record.encode(),
        keys.event("created"): event.SerializeToString(),
        cluster_keys.node("n0"): node.SerializeToString(),
        cluster_keys.submission("demo"): submission("demo", submitter=EVIL),
        cluster_keys.outcome("demo"): outcome.SerializeToString(),
        cluster_keys.SUBMISSIONS + EVIL: b"",
    }.items():
        plain_store.put(key, value)
    server = NodeServer(address, JobLogs(tmp_path, "n0"), lambda job_id: False, None)
    yield plain_etcd.endpoint
    server.stop()


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (["status"], SHOWN),
        (["status", "demo"], f"submitted by {SHOWN}"),
        (["nodes"], SHOWN),
        (["events", "demo"], SHOWN),
        (["events", "--follow", "demo"], f"failed: {SHOWN}"),
        (["logs", "demo"], SHOWN),
        (["logs", "--follow", "demo"], SHOWN),
    ],
)
def test_no_command_shows_what_a_terminal_acts_on(words: list[str], shown: str, cluster: str) -> None:
    done = CliRunner().invoke(
        cli, [words[0], "--etcd", cluster, *words[1:]], prog_name="bagua-launch", env={}, color=True
    )
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exc_info
    assert shown in done.stdout
    for text in (done.stdout, done.stderr):
        assert not ACTED_ON.search(re.sub(r"\x1b\[[0-9;]*m", "", text)), ascii(text)
        for line in text.splitlines():
            assert line.count("\x1b") == 0 or "\x1b[0m" in line, "colours end with the line"
    if words[0] == "logs":
        assert "[n0:0] 20%\n" in done.stdout and r"\x1b[1A" in done.stdout
