"""Nothing of an agent's workers outlives the agent, however it ends."""

from __future__ import annotations

import errno
import fcntl
import os
import resource
import signal
import struct
import subprocess
import sys
import termios
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from bagua_agent.base.errors import InfrastructureLost, InternalError
from bagua_agent.workers.guardian import Guardian
from tests.agent.workers.worker_lab import Workers, is_running, wait_until

WITH_GRANDCHILD = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"], stdout=subprocess.DEVNULL)
print(child.pid, flush=True)
child.wait()
"""

AGENT = """
import os, signal, sys
from pathlib import Path
from bagua_agent.config.job_config import CommandKind, WorkerCommand
from bagua_agent.workers.guardian import Guardian
from bagua_agent.workers.start.spawn import spawn_worker
guardian = Guardian()
guardian.start()
worker = spawn_worker(WorkerCommand(CommandKind.SCRIPT, sys.argv[1]), dict(os.environ), worker_id="w", slot=0,
                      gated=False, preimport=())
guardian.register(worker.pid)
os.set_blocking(worker.stdout_fd, True)
grandchild = int(os.read(worker.stdout_fd, 100))
print(guardian.pid, worker.pid, grandchild, flush=True)
signal.pause()
"""


@pytest.fixture
def guardian() -> Iterator[Guardian]:
    made = Guardian()
    made.start()
    yield made
    made.stop()


@pytest.mark.parametrize("killed_by", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_killed_agent_leaves_no_worker_and_no_grandchild(workers: Workers, killed_by: signal.Signals) -> None:
    script = workers.script(WITH_GRANDCHILD)
    agent = subprocess.Popen([sys.executable, "-c", AGENT, str(script)], stdout=subprocess.PIPE, text=True)
    assert agent.stdout is not None
    try:
        pids = [int(word) for word in agent.stdout.readline().split()]
        assert len(pids) == 3 and all(is_running(pid) for pid in pids)
        assert psutil.Process(pids[2]).ppid() == pids[1]
    finally:
        agent.send_signal(killed_by)
        agent.wait(10)
        agent.stdout.close()
    wait_until(lambda: not any(is_running(pid) for pid in pids), "guardian, worker and grandchild gone")


def test_unregistered_group_is_left_alone(workers: Workers, guardian: Guardian) -> None:
    script = workers.script("import signal\nprint('up', flush=True)\nsignal.pause()\n")
    kept, killed = workers.start(script), workers.start(script)
    for worker in (kept, killed):
        workers.read_line(worker)
        guardian.register(worker.pid)
    guardian.unregister(kept.pid)
    guardian.stop()
    wait_until(lambda: killed.reap() == -signal.SIGKILL, "registered group killed")
    assert kept.reap() is None


def test_groups_left_by_their_leader_are_killed(workers: Workers, guardian: Guardian) -> None:
    worker = workers.start(workers.script(WITH_GRANDCHILD + "\n"))
    grandchild = int(workers.read_line(worker))
    guardian.register(worker.pid)
    os.kill(worker.pid, signal.SIGKILL)  # the leader only, and it stays a zombie
    wait_until(lambda: not is_running(worker.pid), "leader ended")
    assert is_running(grandchild)
    guardian.stop()
    wait_until(lambda: not is_running(grandchild), "grandchild gone")


def test_a_killed_guardian_is_replaced_and_knows_everything(workers: Workers, guardian: Guardian) -> None:
    script = workers.script("import signal\nprint('up', flush=True)\nsignal.pause()\n")
    first, second = workers.start(script), workers.start(script)
    guardian.register(first.pid)
    before = guardian.pid
    assert before is not None
    os.kill(before, signal.SIGKILL)
    wait_until(lambda: not is_running(before), "guardian killed")
    guardian.register(second.pid)
    assert guardian.pid != before
    guardian.stop()
    for worker in (first, second):
        wait_until(lambda worker=worker: worker.reap() == -signal.SIGKILL, "group killed")  # type: ignore[misc]


def refuse() -> None:
    """Stands for a start of a process on a host that is short of memory."""
    raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")


def test_a_guardian_that_cannot_be_started_at_first_is_one_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Guardian, "_launch", staticmethod(refuse))
    guardian = Guardian()
    with pytest.raises(
        InfrastructureLost, match=r"can't start the process .*: Resource temporarily unavailable"
    ):
        guardian.start()
    guardian.stop()


def test_a_killed_guardian_that_cannot_be_replaced_at_once_is_replaced_later(
    workers: Workers, guardian: Guardian, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    script = workers.script("import signal\nprint('up', flush=True)\nsignal.pause()\n")
    ended, kept, new = workers.start(script), workers.start(script), workers.start(script)
    guardian.register(ended.pid)
    guardian.register(kept.pid)
    before = guardian.pid
    assert before is not None
    os.kill(before, signal.SIGKILL)
    wait_until(lambda: not is_running(before), "guardian killed")

    with monkeypatch.context() as short_of_memory:
        short_of_memory.setattr(Guardian, "_launch", staticmethod(refuse))
        guardian.unregister(ended.pid)
        guardian.register(new.pid)
    assert guardian.pid is None
    assert caplog.text.count("Resource temporarily unavailable") == 1
    guardian.register(kept.pid)  # any message
    assert guardian.pid not in (None, before)
    guardian.stop()
    for worker in (kept, new):
        wait_until(lambda worker=worker: worker.reap() == -signal.SIGKILL, "group killed")  # type: ignore[misc]
    assert ended.reap() is None


@pytest.mark.parametrize("noticed", [True, False], ids=["noticed", "unnoticed"])
def test_the_end_cleans_up_although_the_guardian_was_killed(
    workers: Workers, guardian: Guardian, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, noticed: bool
) -> None:
    runtime = tmp_path / "runtime"
    runtime.mkdir()
    guardian.remove_directory(runtime)
    worker = workers.start(workers.script("import signal\nsignal.pause()\n"))
    before = guardian.pid
    assert before is not None
    if not noticed:
        guardian.register(worker.pid)
    os.kill(before, signal.SIGKILL)
    wait_until(lambda: not is_running(before), "guardian killed")
    if noticed:
        with monkeypatch.context() as short_of_memory:
            short_of_memory.setattr(Guardian, "_launch", staticmethod(refuse))
            guardian.register(worker.pid)
    guardian.stop()
    wait_until(lambda: worker.reap() == -signal.SIGKILL, "group killed")
    assert not runtime.exists()


def test_the_runtime_directory_goes_and_what_was_logged_stays(guardian: Guardian, tmp_path: Path) -> None:
    runtime, logs = tmp_path / "runtime", tmp_path / "logs"
    (runtime / "store" / "data").mkdir(parents=True)
    (runtime / "store" / "data" / "wal").write_bytes(b"x")
    kept = tmp_path / "kept"
    kept.mkdir()
    (kept / "file").touch()
    (runtime / "link").symlink_to(kept)
    (logs / "job" / "empty").mkdir(parents=True)
    (logs / "job" / "full").mkdir()
    (logs / "job" / "full" / "stdout.log").write_text("said")
    guardian.remove_directory(runtime)
    guardian.prune_directory(logs)
    guardian.stop()
    assert not runtime.exists()
    assert (kept / "file").exists(), "what a link leads to is not ours"
    assert (logs / "job" / "full" / "stdout.log").read_text() == "said"
    assert not (logs / "job" / "empty").exists()


def test_a_directory_made_again_under_the_same_name_is_left_alone(guardian: Guardian, tmp_path: Path) -> None:
    runtime = tmp_path / "runtime"
    runtime.mkdir()
    guardian.remove_directory(runtime)
    other = tmp_path / "other"
    other.mkdir()
    pid = guardian.pid
    assert pid is not None
    wait_until(lambda: _has_read_everything(pid), "the guardian knows the directory")
    runtime.rename(tmp_path / "moved")
    other.rename(runtime)
    guardian.stop()
    assert runtime.exists() and (tmp_path / "moved").exists()


def test_directories_are_known_to_a_new_guardian_and_named_in_any_bytes(
    guardian: Guardian, tmp_path: Path
) -> None:
    runtime = tmp_path / "with\nline \udcff"
    runtime.mkdir()
    guardian.remove_directory(runtime)
    before = guardian.pid
    assert before is not None
    os.kill(before, signal.SIGKILL)
    wait_until(lambda: not is_running(before), "guardian killed")
    guardian.prune_directory(tmp_path / "anything")
    assert guardian.pid != before
    guardian.stop()
    assert not runtime.exists()


@pytest.mark.parametrize("path", ["/", "/tmp", "relative/two"])
def test_no_shared_directory_is_removed(guardian: Guardian, path: str) -> None:
    with pytest.raises(InternalError):
        guardian.remove_directory(Path(path))


def _has_read_everything(pid: int) -> bool:
    """Its pipe is empty and it waits for more."""
    with open(f"/proc/{pid}/fd/0", "rb") as pipe:
        waiting_bytes = struct.unpack("i", fcntl.ioctl(pipe, termios.FIONREAD, bytes(4)))[0]
    return waiting_bytes == 0 and psutil.Process(pid).status() == psutil.STATUS_SLEEPING


def test_it_ignores_signals_and_is_small(guardian: Guardian) -> None:
    assert guardian.pid is not None
    process = psutil.Process(guardian.pid)
    wanted = sum(1 << (n - 1) for n in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT))
    wait_until(lambda: _ignored_signals(process.pid) & wanted == wanted, "signals ignored")
    process.send_signal(signal.SIGTERM)
    process.send_signal(signal.SIGINT)
    assert process.memory_info().rss < 12 * 1024 * 1024
    assert is_running(guardian.pid)
    assert os.getpgid(guardian.pid) == guardian.pid


def _ignored_signals(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("SigIgn:")).split()[1], 16)


def test_not_started_is_our_bug() -> None:
    with pytest.raises(InternalError):
        Guardian().register(os.getpid())


def test_a_process_with_a_session_of_its_own_is_found_by_its_mark() -> None:
    guardian = Guardian()
    guardian.start()
    guardian.end_marked("BAGUA_TEST_MARK=guardian-1")
    before = {f"MUCH_{number}": "x" * 100_000 for number in range(12)}  # the mark stands behind it
    environment = {"PATH": os.environ["PATH"], **before, "BAGUA_TEST_MARK": "guardian-1"}
    mine = subprocess.Popen(["sleep", "1000"], env=environment, start_new_session=True)
    other = subprocess.Popen(["sleep", "1000"], env={**environment, "BAGUA_TEST_MARK": "guardian-12"})
    try:
        guardian.stop()
        assert mine.wait(5) == -signal.SIGKILL
        assert other.poll() is None, "another agent's"
    finally:
        for process in (mine, other):
            process.kill()
            process.wait(5)


def test_more_processes_than_it_has_descriptors_are_ended() -> None:
    guardian = Guardian()
    guardian.start()
    guardian.end_marked("BAGUA_TEST_MARK=guardian-2")
    assert guardian.pid is not None
    wait_until(lambda: _has_read_everything(guardian.pid or 0), "the guardian knows the mark")
    resource.prlimit(guardian.pid, resource.RLIMIT_NOFILE, (12, 12))
    marked = {"PATH": os.environ["PATH"], "BAGUA_TEST_MARK": "guardian-2"}
    processes = [subprocess.Popen(["sleep", "1000"], env=marked, start_new_session=True) for _ in range(30)]
    try:
        guardian.stop()
        assert [process.wait(5) for process in processes] == [-signal.SIGKILL] * len(processes)
    finally:
        for process in processes:
            process.kill()
            process.wait(5)
