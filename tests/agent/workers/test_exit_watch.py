"""Every exit is reported once, and nothing of the group is left by then."""

from __future__ import annotations

import queue
import signal
import time
from collections.abc import Iterator

import pytest

from bagua_agent.workers.exits.exit_watch import ExitWatch
from bagua_agent.workers.process.worker_process import WorkerProcess
from tests.agent.workers.worker_lab import Workers, is_running, wait_until
from tests.lab.wait import HANG_S

Reports = queue.Queue[tuple[WorkerProcess, int, float]]


@pytest.fixture
def reports() -> Reports:
    return queue.Queue()


@pytest.fixture
def watch(reports: Reports) -> Iterator[ExitWatch]:
    made = ExitWatch(lambda worker, returncode: reports.put((worker, returncode, time.monotonic())))
    made.start()
    yield made
    made.stop()


def test_each_exit_is_reported_once_with_its_code(
    workers: Workers, watch: ExitWatch, reports: Reports
) -> None:
    script = workers.script("import sys\nsys.exit(int(sys.argv[1]))\n")
    codes = {}
    for code in (0, 3, 77):
        worker = workers.start(script, str(code))
        watch.watch(worker)
        codes[worker] = code
    seen = [reports.get(timeout=HANG_S)[:2] for _ in codes]
    assert dict(seen) == codes
    watch.stop()
    assert reports.empty()


def test_signal_is_reported_at_once(workers: Workers, watch: ExitWatch, reports: Reports) -> None:
    worker = workers.start(workers.script("import signal\nprint('up', flush=True)\nsignal.pause()\n"))
    watch.watch(worker)
    workers.read_line(worker)
    killed = time.monotonic()
    worker.signal_group(signal.SIGKILL)
    _, returncode, at = reports.get(timeout=HANG_S)
    assert returncode == worker.returncode == -signal.SIGKILL
    assert at - killed < 1.0  # generous: the machine may be busy


def test_worker_that_ended_before_it_was_watched(
    workers: Workers, watch: ExitWatch, reports: Reports
) -> None:
    worker = workers.start(workers.script(""))
    wait_until(lambda: not is_running(worker.pid), "ended")
    watch.watch(worker)
    assert reports.get(timeout=HANG_S)[1] == 0


def test_grandchildren_are_gone_when_the_exit_is_reported(
    workers: Workers, watch: ExitWatch, reports: Reports
) -> None:
    source = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
print(child.pid, flush=True)
"""
    worker = workers.start(workers.script(source))
    watch.watch(worker)
    grandchild = int(workers.read_line(worker))
    assert reports.get(timeout=HANG_S)[1] == 0
    wait_until(lambda: not is_running(grandchild), "grandchild gone", 2.0)


def test_a_failing_callback_does_not_end_the_watch(workers: Workers) -> None:
    seen: queue.Queue[str] = queue.Queue()

    def on_exit(worker: WorkerProcess, returncode: int) -> None:
        seen.put(worker.worker_id)
        raise RuntimeError("a fault of the callback")

    watch = ExitWatch(on_exit)
    watch.start()
    script = workers.script("")
    for worker_id in ("a", "b"):
        watch.watch(workers.start(script, worker_id=worker_id))
        assert seen.get(timeout=HANG_S) == worker_id
    watch.stop()


def test_stop_without_start_and_twice() -> None:
    watch = ExitWatch(lambda worker, returncode: None)
    watch.stop()
    watch.stop()
