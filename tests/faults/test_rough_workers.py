"""Workers that behave badly: they flood, ignore, fork, block, crash at once, come by the dozen. The job continues."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

import tests.faults.job as harness
from bagua_agent.etcd.server.embedded import EmbeddedEtcd
from tests.faults.conftest import MakeJob
from tests.faults.job import Job, Node
from tests.fuzz.light_workers import COMMAND, LightWorkers
from tests.lab.free_port import free_port
from tests.lab.wait import eventually
from tests.lab.zygote import REAL_START_VARIABLE

MIB = 1 << 20
MOST_OF_AN_AGENT_BYTES = 160 * MIB

MakeRough = Callable[[str], None]


@pytest.fixture
def rough(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> MakeRough:
    """The script of the test's jobs begins with these lines; DIRECTORY and SLOT are known to them."""
    real = harness.SCRIPT

    def make(lines: str) -> None:
        script = tmp_path / "rough.py"
        head = (
            "import os, runpy, signal, subprocess, sys, threading, time\nfrom pathlib import Path\n"
            # as the real script does: by this the agent sees that its workers follow membership in process
            "from bagua_core import init_process_group\n"
            f"DIRECTORY = Path({str(tmp_path)!r})\nSLOT = int(os.environ['BAGUA_SLOT'])\n"
        )
        script.write_text(f"{head}{lines}\nrunpy.run_path({str(real)!r}, run_name='__main__')\n")
        monkeypatch.setattr(harness, "SCRIPT", script)

    return make


@pytest.fixture
def etcd() -> Iterator[str]:
    server = EmbeddedEtcd.start(f"127.0.0.1:{free_port()}")
    yield server.endpoint.removeprefix("http://")
    server.stop()


def peak_bytes(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1]) * 1024


def page_of(node: Node) -> str:
    node.await_line("dashboard at http://")
    found = re.search(r"dashboard at (http://[0-9.:]+/)", node.log)
    assert found is not None
    return found[1]


def get(address: str) -> str:
    with urllib.request.urlopen(address, timeout=40) as answer:
        return str(answer.read().decode())


def await_file(path: Path, deadline_s: float = 40.0) -> str:
    eventually(path.exists, deadline_s, f"{path.name} is written")
    return path.read_text()


# -- output


def test_a_worker_floods_its_stdout(
    job: MakeJob, rough: MakeRough, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """100 MB through the agent into a file: all of it is there, and none of it stays in the agent, which serves the
    dashboard meanwhile."""
    monkeypatch.setenv(REAL_START_VARIABLE, "1")  # a forked agent's memory is the zygote's too
    rough("""
def flood():
    for start in range(0, 1_000_000, 1000):
        os.write(1, b''.join(b'%0100d\\n' % n for n in range(start, start + 1000)))
    (DIRECTORY / 'flooded').write_text('')
if SLOT == 0:
    threading.Thread(target=flood, daemon=True).start()
""")
    logs = tmp_path / "logs"
    one = job(options=["--log-dir", str(logs), "--redirects", "1", "--dashboard=0"])
    node = one.start(slots=2)
    page = page_of(node)
    one.await_step(5)
    await_file(tmp_path / "flooded")

    def ranks() -> list[int | None]:
        return [worker["rank"] for worker in json.loads(get(page + "api/page"))["workers"]]

    eventually(lambda: ranks() == [0, 1], 40.0, "the page shows both workers")
    for _ in range(20):
        assert ranks() == [0, 1] and "app.js" in get(page)
    assert "bagua_step" in get(page + "metrics")
    assert peak_bytes(node.pid) < MOST_OF_AN_AGENT_BYTES
    one.finish()
    one.check(finished=2)
    [log] = [path for path in logs.rglob("stdout*") if path.stat().st_size > MIB]
    assert log.stat().st_size == 101_000_000, "every line is there"
    with log.open("rb") as lines:
        assert all(int(line) == n for n, line in enumerate(lines)), "in order, none torn"
    log.unlink()


def test_a_full_log_directory(job: MakeJob, rough: MakeRough, tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    logs.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(logs)], check=True)
    try:
        rough("""
for n in range(2000):
    os.write(1, b'%01000d\\n' % n)
(DIRECTORY / f'flooded-{SLOT}').write_text('')
""")
        one = job(options=["--log-dir", str(logs), "--redirects", "1"])
        node = one.start(slots=2)
        one.await_world(2)
        for slot in range(2):
            await_file(tmp_path / f"flooded-{slot}")
        assert os.statvfs(logs).f_bavail == 0, "the fault happened"
        one.finish()
        one.check(finished=2)
        said = [line for line in node.log.splitlines() if "is not written any further" in line]
        assert len(said) == 2, "once for each worker's file"
        assert all("No space left on device" in line for line in said)
    finally:
        subprocess.run(["umount", "-l", str(logs)], check=True)


# -- ends


def test_a_worker_that_ignores_sigterm_is_killed(job: MakeJob, rough: MakeRough, tmp_path: Path) -> None:
    """Its peer's script fails, which ends the job; it neither receives SIGTERM nor comes to a boundary."""
    rough("""
if SLOT == 0:
    signal.signal(signal.SIGTERM, lambda *_: (DIRECTORY / 'ignored').write_text(''))
""")
    one = job(script=["--raise-at", "3", "--raise-in-slot", "1"])
    node = one.start(slots=2)
    one.await_step(1)
    began_s = time.monotonic()
    assert node.process.wait(30) == 1
    assert time.monotonic() - began_s < 20
    assert (tmp_path / "ignored").exists(), "it was asked first"
    one.check_nothing_left()


def test_a_node_that_is_told_twice_does_not_wait_for_a_deaf_worker(
    job: MakeJob, rough: MakeRough, tmp_path: Path
) -> None:
    rough("""
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)
(DIRECTORY / 'deaf').write_text('')
""")
    one = job(script=["--hang-at", "0"])
    node = one.start()
    one.await_hanging_worker()
    assert (tmp_path / "deaf").exists()
    node.send(signal.SIGTERM)
    node.await_line("leaving at the next step boundary")
    node.send(signal.SIGTERM)
    assert node.process.wait(10) == 128 + signal.SIGTERM
    one.check_nothing_left()


def test_a_storm_of_sigterm(job: MakeJob, etcd: str) -> None:
    """A node is asked to leave again and again; it goes in bounded time, and the other one trains on."""
    one = job(endpoints=etcd, nodes="1:2")
    one.start()
    one.await_world(1)
    stormed = one.start(slots=2)
    both = one.await_world(3)
    for _ in range(30):
        with contextlib.suppress(ProcessLookupError):
            stormed.send(signal.SIGTERM)
    assert stormed.process.wait(15) in (0, 128 + signal.SIGTERM)
    assert stormed.says("leaving at the next step boundary")
    assert not stormed.says("Traceback")
    one.await_world(1, after_step=both)
    one.finish([0, stormed.process.returncode or 0])
    one.check(finished=1)


# -- other processes


def test_grandchildren_end_with_their_worker(job: MakeJob, rough: MakeRough, tmp_path: Path) -> None:
    """Those of the worker's group; one with a session of its own at the end of its agent (guardian.py), and until then
    it delays no process although it keeps the worker's output open. Orphans go to init, or to the agent while a worker
    is handed over to it (orphans.py): one that has ended there is reaped at the latest when a worker comes or goes."""
    rough("""
if SLOT == 0:
    ordinary = subprocess.Popen(['sleep', '1000'])
    with open(DIRECTORY / 'orphan', 'w') as file:
        subprocess.run(['sh', '-c', 'sleep 1000 & echo $!; sleep 1000 & echo $!'], stdout=file)
    own_session = subprocess.Popen(['sleep', '1000'], start_new_session=True)
    (DIRECTORY / 'pids').write_text(f'{ordinary.pid} {own_session.pid}')
""")
    one = job()
    node = one.start(slots=2)
    one.await_step(5)
    ordinary, own_session = map(int, await_file(tmp_path / "pids").split())
    orphan, short_lived = map(int, (tmp_path / "orphan").read_text().split())
    try:
        assert one.alive([ordinary, own_session, orphan]) == [ordinary, own_session, orphan]
        os.kill(short_lived, signal.SIGKILL)
        below = psutil.Process(node.pid)
        [peer] = [w for w in node.workers if w.slot == 1]
        peer.kill()
        eventually(lambda: short_lived not in [p.pid for p in below.children()], 10.0, "it is reaped")
        one.await_world(2, after_step=one.await_world(1))
        one.hurry()
        assert node.process.wait(40) == 0
        eventually(lambda: not one.alive([ordinary, orphan]), 5.0, "the group ends with its worker")
        eventually(lambda: not one.alive([own_session]), 5.0, "by its environment")
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(own_session, signal.SIGKILL)
    one.check(finished=2)


# -- a worker that holds its interpreter


HOLDING = """
import ctypes
def hold():
    while not (DIRECTORY / 'hold').exists():
        time.sleep(0.01)
    (DIRECTORY / 'holding').write_text('')
    ctypes.PyDLL(None).usleep(4_000_000)  # PyDLL: with the interpreter's lock held
    (DIRECTORY / 'held').write_text('')
if SLOT == 0:
    threading.Thread(target=hold, daemon=True).start()
"""


def test_a_peer_dies_and_another_joins_while_a_worker_holds_its_interpreter(
    job: MakeJob, rough: MakeRough, tmp_path: Path
) -> None:
    """No Python runs in it for four seconds. Its agent answers for it, so it is no loss: the others wait."""
    rough(HOLDING)
    one = job()
    node = one.start(slots=3)
    one.await_world(3)
    node.await_line("is in force")
    holder, victim, other = node.workers
    (tmp_path / "hold").touch()
    await_file(tmp_path / "holding")
    before = one.last_world(3)
    victim.kill()
    node.await_line("worker in slot 1 ended: killed by SIGKILL")
    assert not (tmp_path / "held").exists(), "it holds it still"
    two = one.await_world(2, after_step=before)
    assert (tmp_path / "held").exists()
    one.await_world(3, after_step=two)
    kept = {worker.worker_id for worker in node.workers}
    assert {holder.worker_id, other.worker_id} <= kept, "who computes for long is no loss"
    one.finish()
    one.check(finished=3)


# -- a node that cannot keep a worker


def test_a_node_whose_workers_crash_at_once_disturbs_no_other(
    job: MakeJob, rough: MakeRough, etcd: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rough("if 'ROUGH_CRASH' in os.environ: os.kill(os.getpid(), signal.SIGKILL)")
    one = job(endpoints=etcd, nodes="1:2")
    one.start(slots=2)
    both = one.await_world(2)
    with monkeypatch.context() as crashing:
        crashing.setenv("ROUGH_CRASH", "1")
        broken = one.start()
    broken.await_line("worker in slot 0 ended", "SIGKILL", times=3)
    during = one.step
    one.await_step(during + 5)
    assert broken.process.is_running, "it goes on trying"
    one.finish()
    one.check(finished=2)
    later = [line for line in one.ledger.lines if line.step > both]
    assert {line.world_size for line in later} == {2} and len({line.generation for line in later}) == 1
    assert not one.nodes[0].says("did not happen")


# -- many at once, with light workers


class LightJob:
    """Nodes whose workers are light; `last` is what ends them.

    An executable's workers are taken for such as are started anew for each generation, until the first one opens a
    session; so the first generation is superseded.
    """

    def __init__(self, job: Job, directory: Path) -> None:
        self.job = job
        self.last = directory / "end"
        self._workers = LightWorkers()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._attend, daemon=True)
        self._thread.start()

    def start(self, slots: int) -> Node:
        words = [sys.executable, "-m", "bagua_launch", *self.job._options, "--nproc-per-node", str(slots)]
        words += ["--no-python", *COMMAND, str(self.last)]
        process = harness._start_agent(None, words, self.job._log_file())
        self.job.nodes.append(Node(process, None))
        return self.job.nodes[-1]

    def _attend(self) -> None:
        while not self._stopping.wait(0.05):
            self._workers.attend([n.pid for n in self.job.nodes if n.process.is_running])

    def close(self) -> None:
        self._stopping.set()
        self._thread.join(5.0)
        self._workers.close()


@pytest.fixture
def light(job: MakeJob, etcd: str, tmp_path: Path) -> Iterator[LightJob]:
    made = LightJob(job(endpoints=etcd, nodes="1:2"), tmp_path)
    yield made
    made.close()


def numbers(node: Node) -> list[int]:
    """The generations that this node told of."""
    words = [line.partition("generation ")[2].split(",")[0].split(" ")[0] for line in node.log.splitlines()]
    return sorted({int(word) for word in words if word.isdigit()})


def test_fifty_join_at_once(light: LightJob) -> None:
    first = light.start(1)
    first.await_line("is in force")
    began_s = time.monotonic()
    alone = len(numbers(first))
    many = light.start(50)
    first.await_line("51 workers", deadline_s=20)
    many.await_line("is in force", deadline_s=20)
    took_s = time.monotonic() - began_s
    assert took_s < 20
    assert len(numbers(first)) <= alone + 3, f"one change, not fifty: {numbers(first)}"
    assert psutil.pid_exists(first.pid) and not first.says("Traceback") and not many.says("Traceback")
    light.last.touch()


def test_a_node_leaves_and_comes_back_ten_times(light: LightJob) -> None:
    first = light.start(1)
    first.await_line("is in force")
    alone = len(numbers(first))
    for time_before in range(10):
        again = light.start(1)
        again.await_line("is in force")
        again.send(signal.SIGTERM)
        assert again.process.wait(15) == 0, again.log
        assert again.says("left; the job goes on without this node"), time_before
    assert len(numbers(first)) == alone + 2 * 10, "one to come and one to go, each time"
    assert not first.says("did not happen") and not first.says("Traceback")
    light.last.touch()
