"""Groups end in bounded time and whole."""

from __future__ import annotations

import os
import queue
import signal
import time

import pytest

from bagua_agent.workers.exits import termination
from bagua_agent.workers.exits.exit_watch import ExitWatch
from bagua_agent.workers.exits.termination import end_groups, is_group_running, kill_group
from bagua_agent.workers.process.worker_process import WorkerProcess
from tests.agent.workers.worker_lab import Workers, is_running, wait_until
from tests.lab.wait import HANG_S

STUBBORN = """
import os, signal, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = os.fork()
os.write(1, b"%d\\n" % os.getpid())  # at once: both write here
while True:
    signal.pause()
"""
# Waits for a blocked signal: one that came just before a pause() would be lost.
OBEDIENT = """
import signal, sys
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
print("up", flush=True)
signal.sigwait({signal.SIGTERM})
sys.exit(5)
"""


def test_sigterm_is_enough(workers: Workers) -> None:
    worker = workers.start(workers.script(OBEDIENT))
    workers.read_line(worker)
    begin = time.monotonic()
    assert end_groups([worker], grace_s=20.0)
    assert worker.returncode == 5
    assert time.monotonic() - begin < 5.0


def test_sigkill_after_the_grace_for_the_whole_group(workers: Workers) -> None:
    worker = workers.start(workers.script(STUBBORN))
    pids = [int(workers.read_line(worker)) for _ in range(2)]
    begin = time.monotonic()
    assert end_groups([worker], grace_s=0.2)
    assert 0.2 <= time.monotonic() - begin < 5.0
    assert worker.returncode == -signal.SIGKILL
    assert not any(is_running(pid) for pid in pids)


@pytest.mark.parametrize("first", [signal.SIGTERM, signal.SIGINT])
def test_a_worker_is_asked_to_end_once(
    workers: Workers, monkeypatch: pytest.MonkeyPatch, first: signal.Signals
) -> None:
    """A second signal would interrupt the handler that saves a snapshot."""
    sent: list[int] = []
    monkeypatch.setattr(WorkerProcess, "_signal_group", lambda worker, number: sent.append(number))
    worker = workers.start(workers.script(OBEDIENT))
    workers.read_line(worker)
    worker.ask_to_end(first)
    worker.ask_to_end(signal.SIGTERM)
    monkeypatch.setattr(termination, "KILL_TIMEOUT_S", 0.0)
    end_groups([worker], grace_s=0.01)
    assert sent == [first, signal.SIGKILL]
    monkeypatch.undo()
    assert kill_group(worker)


def test_a_worker_that_was_asked_before_has_its_grace_from_then_on(
    workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = workers.start(workers.script(STUBBORN))
    workers.read_line(worker)
    asked_s = time.monotonic() - HANG_S
    with monkeypatch.context() as earlier:
        earlier.setattr(time, "monotonic", lambda: asked_s)
        worker.ask_to_end(signal.SIGTERM)
    assert worker.ask_to_end(signal.SIGTERM) == asked_s
    assert end_groups([worker], grace_s=HANG_S)
    assert time.monotonic() - asked_s < 2 * HANG_S


def test_the_grace_ends_early_for_one_in_a_hurry(workers: Workers) -> None:
    worker = workers.start(workers.script(STUBBORN))
    workers.read_line(worker)
    answers = iter([False, True])
    begin = time.monotonic()
    assert end_groups([worker], grace_s=HANG_S, is_hurried=lambda: next(answers))
    assert time.monotonic() - begin < HANG_S
    assert worker.returncode == -signal.SIGKILL


def test_immediate(workers: Workers) -> None:
    worker = workers.start(workers.script(OBEDIENT))
    workers.read_line(worker)
    assert kill_group(worker)
    assert worker.returncode == -signal.SIGKILL


def test_several_share_the_grace_and_a_watch_still_reports(workers: Workers) -> None:
    reports: queue.Queue[int] = queue.Queue()
    watch = ExitWatch(lambda worker, returncode: reports.put(returncode))
    watch.start()
    script = workers.script(STUBBORN)
    started = [workers.start(script) for _ in range(3)]
    for worker in started:
        workers.read_line(worker)
        watch.watch(worker)
    begin = time.monotonic()
    assert end_groups(started, grace_s=0.3)
    assert time.monotonic() - begin < 0.3 * 3 + 1.0
    assert [reports.get(timeout=HANG_S) for _ in started] == [-signal.SIGKILL] * 3
    watch.stop()


def test_already_ended(workers: Workers) -> None:
    worker = workers.start(workers.script(""))
    wait_until(lambda: worker.reap() is not None, "ended")
    assert end_groups([worker], grace_s=5.0)
    assert worker.returncode == 0


def test_a_zombie_is_not_running(workers: Workers) -> None:
    worker = workers.start(workers.script(""))
    wait_until(lambda: not is_running(worker.pid), "ended")
    assert not is_group_running(worker.pid)
    assert is_group_running(os.getpgrp())
