"""An etcd whose database is full: reads work, writes say what to do, and all goes on once there is room."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from bagua_agent.base.errors import StoreFull
from bagua_agent.etcd import cluster_keys
from bagua_agent.etcd.client import Put, Store, absent
from bagua_agent.etcd.connection import Connection
from bagua_agent.etcd.key_range import KeyRange
from bagua_agent.etcd.leased_keys import LeasedKeys
from bagua_agent.etcd.mirror import Mirror
from tests.agent.etcd.conftest import Recorder
from tests.lab.free_port import free_port
from tests.lab.full_etcd import FullEtcd
from tests.lab.wait import eventually

DEADLINE_S = 20.0
SAID = "refuses writes: its database is full (NOSPACE)"
CONFIG = """
insecure = true
[etcd]
endpoints = ["{endpoint}"]
[node]
name = "n0"
slots = 1
[listen]
address = "127.0.0.1"
port = {port}
[directories]
state = "{directory}/state"
log = "{directory}/log"
[times]
node_lease_s = 2.0
"""


@pytest.fixture
def full(tmp_path: Path) -> Iterator[FullEtcd]:
    made = FullEtcd(tmp_path, free_port(), free_port())
    made.store.put("/bagua/v1/a", b"1")
    made.store.put("/bagua/v1/b/c", b"2")
    made.fill()
    yield made
    made.stop()


def test_all_reads_work_and_writes_say_what_to_do(
    full: FullEtcd, make_store: Callable[..., Store], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    store = make_store(full.endpoint)
    a, b = KeyRange.of_key("/bagua/v1/a"), KeyRange.of_prefix("/bagua/v1/b/")
    assert store.status().is_full
    found, revision = store.get_ranges([a, b])
    assert [kv.value for kv in found] == [b"1", b"2"] and revision > 2
    named, count = store.get_and_count(["/bagua/v1/a", "/bagua/v1/none"], "/bagua/v1/")
    assert named.keys() == {"/bagua/v1/a"} and count == 2
    seen: Recorder[object] = Recorder()
    mirror = Mirror(store, [a, b], seen)
    mirror.start()
    assert mirror.value("/bagua/v1/b/c") == b"2"
    writes: list[Callable[[], object]] = [
        lambda: store.put("/bagua/v1/a", b"3"),
        lambda: store.transact([absent("/bagua/v1/x")], [Put("/bagua/v1/x", b"3")]),
        lambda: store.lease_grant(10),
    ]
    for write in writes * 2:
        with pytest.raises(
            StoreFull, match=r"compact and defragment it or raise --quota-backend-bytes"
        ) as error:
            write()
        assert SAID in str(error.value) and "`etcdctl alarm disarm`" in str(error.value)
    assert len([r for r in caplog.records if SAID in r.getMessage()]) == 1, "said once"
    full.make_room()
    assert not store.status().is_full
    for write in writes:
        write()
    assert len([r for r in caplog.records if "takes writes again" in r.getMessage()]) == 1
    seen.wait_for(lambda calls: len(calls) >= 2)
    mirror.stop()


def test_reads_go_on_while_room_is_made(
    full: FullEtcd, make_store: Callable[..., Store], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A compaction between the first and the second range takes the revision away that both were to be read at."""
    store = make_store(full.endpoint)
    compacted: list[bool] = []
    reads: list[Any] = []

    class Compacting:
        """A client's stub. History goes before the second read, whichever connection has the first one's answer: also
        one that the store has just opened beside another."""

        def __init__(self, stub: Any) -> None:
            self._stub = stub

        def __getattr__(self, name: str) -> Any:
            return getattr(self._stub, name)

        def Range(self, *args: Any, **more: Any) -> Any:
            if reads and not compacted:
                full.store.delete("/fill/0")
                full.store.compact(full.store.status().revision)
                compacted.append(True)
            answer = self._stub.Range(*args, **more)
            reads.append(answer)
            return answer

    plain = Connection.call

    def call(self: Connection, attempt: Callable[[Any], Any], *limits: float) -> Any:
        def compacting(client: Any) -> Any:
            if not isinstance(client.kvstub, Compacting):
                client.kvstub = Compacting(client.kvstub)
            return attempt(client)

        return plain(self, compacting, *limits)

    monkeypatch.setattr(Connection, "call", call)
    found, _ = store.get_ranges([KeyRange.of_key("/bagua/v1/a"), KeyRange.of_prefix("/bagua/v1/b/")])
    assert [kv.value for kv in found] == [b"1", b"2"] and compacted


def test_leased_keys_stand_through_it_and_new_ones_come_after(
    full: FullEtcd, make_store: Callable[..., Store]
) -> None:
    full.make_room()
    store = make_store(full.endpoint)
    leased = LeasedKeys(store, 2.0)
    try:
        leased.put("/bagua/v1/old", b"1")
        assert leased.flush(DEADLINE_S)
        created = store.get("/bagua/v1/old")
        full.fill()
        leased.put("/bagua/v1/new", b"1")
        assert not leased.flush(3.0), "longer than the lease"
        assert store.get("/bagua/v1/old") == created
        full.make_room()
        assert leased.flush(DEADLINE_S) and store.get("/bagua/v1/new") is not None
    finally:
        leased.close()


def test_a_daemon_that_starts_on_it_waits_and_says_so_once(full: FullEtcd, tmp_path: Path) -> None:
    config = tmp_path / "agent.toml"
    config.write_text(CONFIG.format(endpoint=full.endpoint, port=free_port(), directory=tmp_path))
    log = tmp_path / "daemon.log"
    with log.open("wb") as out:
        daemon = subprocess.Popen(
            [sys.executable, "-m", "bagua_agent.service", "serve", "--plain-units", "--config", str(config)],
            stdout=out, stderr=out, env=dict(os.environ),
        )  # fmt: skip
    try:
        eventually(lambda: SAID in log.read_text(), DEADLINE_S, lambda: log.read_text())
        with pytest.raises(subprocess.TimeoutExpired):
            daemon.wait(5.0)
        lines = [line for line in log.read_text().splitlines() if "NOSPACE" in line]
        assert len(lines) <= 3, lines  # the store once, and who waits for it
        full.make_room()
        eventually(
            lambda: (
                full.store.get(cluster_keys.node("n0")) is not None
                and full.store.get(cluster_keys.SCHEDULER) is not None
            ),
            DEADLINE_S,
            lambda: log.read_text(),
        )
        assert "takes writes again" in log.read_text()
        daemon.send_signal(signal.SIGTERM)
        assert daemon.wait(DEADLINE_S) == 0, log.read_text()
    finally:
        if daemon.poll() is None:
            daemon.kill()
            daemon.wait(DEADLINE_S)


def test_a_job_that_starts_on_it_waits_and_says_so(full: FullEtcd, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("print('trained')\n")
    log = tmp_path / "agent.log"
    words = ["--nnodes", "1", "--nproc-per-node", "1", "--rdzv-id", "demo", "--rdzv-endpoint", full.endpoint]
    with log.open("wb") as out:
        agent = subprocess.Popen(
            [sys.executable, "-m", "bagua_launch", *words, "--start-method", "spawn", str(script)],
            stdout=out, stderr=out, env=dict(os.environ),
        )  # fmt: skip
    try:
        eventually(lambda: SAID in log.read_text(), DEADLINE_S, lambda: log.read_text())
        with pytest.raises(subprocess.TimeoutExpired):
            agent.wait(2.0)
        full.make_room()
        assert agent.wait(60.0) == 0, log.read_text()
        assert "trained" in log.read_text() and log.read_text().count(SAID) == 1, log.read_text()
    finally:
        if agent.poll() is None:
            agent.kill()
            agent.wait(DEADLINE_S)


TRAIN = """
import os, sys, time
from pathlib import Path
import torch
import bagua_core as bagua
bagua.init_process_group()
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model = bagua.DistributedDataParallel(model, optimizers=[optimizer])
loader = bagua.ElasticDataLoader(
    torch.utils.data.TensorDataset(torch.ones(1_000_000, 4)), global_batch_size=8, seed=1
)
out = Path(sys.argv[1])
for (x,) in loader:
    optimizer.zero_grad()
    model(x).mean().backward()
    optimizer.step()
    told = out / f"{os.getpid()}.new"
    told.write_text(f"{loader.step} {bagua.get_world_size()}")
    told.rename(out / f"{os.getpid()}")
    if bagua.allreduce(torch.tensor([int((out / "enough").exists())]), bagua.ReduceOp.MAX)[0]:
        break  # all in the same step
    time.sleep(0.02)
"""


def cpu_of_waiting_s(process: subprocess.Popen[bytes]) -> float:
    """Seconds of CPU that it takes in six seconds, in which it does not end."""

    def used_s() -> float:
        shown = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(shown[11]) + int(shown[12])) / os.sysconf("SC_CLK_TCK")

    before_s = used_s()
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(6.0)
    return used_s() - before_s


def test_a_job_that_meets_it_trains_on_and_changes_its_members_afterwards(
    full: FullEtcd, tmp_path: Path
) -> None:
    full.make_room()
    script, out, log = tmp_path / "train.py", tmp_path / "out", tmp_path / "agent.log"
    script.write_text(TRAIN)
    out.mkdir()
    words = ["--nnodes", "1", "--nproc-per-node", "2", "--rdzv-id", "demo", "--rdzv-endpoint", full.endpoint]

    def steps(world: int) -> dict[int, int]:
        """Of living workers in a world of that size, by process."""
        told = {int(p.name): p.read_text().split() for p in out.iterdir() if p.name.isdecimal()}
        return {
            pid: int(text[0])
            for pid, text in told.items()
            if len(text) == 2 and int(text[1]) == world and Path(f"/proc/{pid}").exists()
        }

    with log.open("wb") as output:
        agent = subprocess.Popen(
            [sys.executable, "-m", "bagua_launch", *words, str(script), str(out)],
            stdout=output, stderr=output, env=dict(os.environ),
        )  # fmt: skip
    try:
        eventually(lambda: len(steps(2)) == 2, 60.0, lambda: log.read_text())
        full.fill()
        before = max(steps(2).values())
        eventually(lambda: max(steps(2).values(), default=0) > before + 20, DEADLINE_S, "no step is missed")
        os.kill(min(steps(2)), signal.SIGKILL)
        eventually(lambda: SAID in log.read_text(), DEADLINE_S, lambda: log.read_text())
        assert cpu_of_waiting_s(agent) < 3.0, log.read_text()[-3000:]
        assert log.read_text().count("NOSPACE") <= 3, log.read_text()
        full.make_room()
        eventually(lambda: len(steps(2)) == 2, 60.0, lambda: log.read_text())
        full.fill()
        (out / "enough").touch()
        eventually(lambda: not steps(2), DEADLINE_S, "the workers end")
        assert cpu_of_waiting_s(agent) < 3.0, log.read_text()[-3000:]
        assert log.read_text().count("NOSPACE") <= 6, log.read_text()
        full.make_room()
        assert agent.wait(60.0) == 0, log.read_text()
    finally:
        if agent.poll() is None:
            agent.send_signal(signal.SIGTERM)
            try:
                agent.wait(DEADLINE_S)
            except subprocess.TimeoutExpired:
                agent.kill()
                agent.wait(DEADLINE_S)
