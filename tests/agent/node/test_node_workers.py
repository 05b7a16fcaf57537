"""A worker that can't be started leaves nothing behind, and the others go on."""

from __future__ import annotations

import errno
import os
import queue
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from bagua_agent.base.errors import InfrastructureLost, UserError
from bagua_agent.base.timers import Timers
from bagua_agent.config.job_config import CommandKind, JobConfig, WorkerCommand
from bagua_agent.job_state.console import JobTerminal
from bagua_agent.node import killed_workers, node_workers
from bagua_agent.node.killed_workers import KilledWorkers
from bagua_agent.node.node_workers import NodeWorkers
from bagua_agent.workers.exits import termination
from bagua_agent.workers.process.worker_process import WorkerProcess
from tests.lab.left_open import open_descriptors, opened_since
from tests.lab.wait import eventually

DEADLINE_S = 20.0
NO_SPACE = OSError(errno.ENOSPC, "No space left on device")
NO_PROCESS = BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
NO_DESCRIPTOR = OSError(errno.EMFILE, "Too many open files")


@pytest.fixture
def exits() -> queue.SimpleQueue[str]:
    return queue.SimpleQueue()


@pytest.fixture
def workers(tmp_path: Path, exits: queue.SimpleQueue[str]) -> Iterator[NodeWorkers]:
    config = JobConfig(
        job_id="job",
        command=WorkerCommand(CommandKind.EXECUTABLE, "/bin/sleep", ("60",)),
        slots=2,
        log_dir=str(tmp_path / "log"),
    )
    made = NodeWorkers(
        config, "host-abc", "host", "127.0.0.1", tmp_path, lambda worker_id, code: exits.put(worker_id)
    )
    try:
        made.start(at_once=False)
        yield made
    finally:
        made.close()


def children() -> set[int]:
    return {child.pid for child in psutil.Process().children()}


@pytest.mark.parametrize(
    ("place", "error"),
    [
        ("bagua_agent.node.node_workers.spawn_worker", NO_PROCESS),
        ("bagua_agent.workers.output.log_layout.Path.mkdir", NO_SPACE),
        ("bagua_agent.workers.start.spawn.subprocess.Popen", NO_PROCESS),
        ("bagua_agent.workers.start.spawn.WorkerProcess", NO_DESCRIPTOR),
        ("bagua_agent.node.node_workers.ExitWatch.watch", NO_DESCRIPTOR),
        ("bagua_agent.node.node_workers.OutputRouter.attach", NO_SPACE),
    ],
)
def test_nothing_is_left_of_a_worker_that_could_not_be_started(
    workers: NodeWorkers,
    exits: queue.SimpleQueue[str],
    monkeypatch: pytest.MonkeyPatch,
    place: str,
    error: OSError,
) -> None:
    healthy = workers.spawn(0)
    expected: set[str] = set()
    workers.on_spawning, workers.on_not_spawned = expected.add, expected.discard
    processes, descriptors = children(), open_descriptors()
    met: list[str] = []

    def fail(*arguments: object, **keywords: object) -> None:
        met.append(place)
        raise error

    with monkeypatch.context() as patched:
        patched.setattr(place, fail)
        with pytest.raises(InfrastructureLost):
            workers.spawn(1)
    assert met, "the fault happened"
    assert workers.worker_ids == [healthy] and expected == set()
    assert children() == processes
    eventually(lambda: not opened_since(descriptors), DEADLINE_S, "descriptors are closed")
    second = workers.spawn(1)
    assert workers.worker_ids == [healthy, second] and expected == {second}
    assert healthy not in [exits.get() for _ in range(exits.qsize())]


def test_what_the_user_must_mend_is_his(workers: NodeWorkers, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object, **keywords: object) -> None:
        raise UserError("no such script")

    monkeypatch.setattr(node_workers, "spawn_worker", refuse)
    with pytest.raises(UserError, match="no such script"):
        workers.spawn(0)
    assert workers.worker_ids == []


def test_a_restart_is_each_end_of_a_worker_of_the_node(
    workers: NodeWorkers, exits: queue.SimpleQueue[str]
) -> None:
    def restarts(worker_id: str) -> str:
        process = psutil.Process(workers._workers[worker_id].process.pid)
        # the kernel shows none for a moment after Popen has seen the exec
        return eventually(
            lambda: process.environ().get("TORCHELASTIC_RESTART_COUNT"), DEADLINE_S, "its variables"
        )

    first, other = workers.spawn(0), workers.spawn(1)
    assert (restarts(first), restarts(other)) == ("0", "0")
    os.kill(workers._workers[first].process.pid, signal.SIGKILL)
    assert exits.get(timeout=DEADLINE_S) == first
    workers.ended(first, -signal.SIGKILL)
    assert restarts(workers.spawn(0)) == "1"
    assert restarts(other) == "0", "it was not started again"


# -- SIGKILL ends no process that the kernel holds, as in a driver that does not answer


def held_by_the_kernel(patched: pytest.MonkeyPatch) -> None:
    signals = WorkerProcess._signal_group

    def but_sigkill(self: WorkerProcess, number: int) -> None:
        if number != signal.SIGKILL:
            signals(self, number)

    patched.setattr(WorkerProcess, "_signal_group", but_sigkill)


@pytest.mark.parametrize("together", [False, True])
def test_a_worker_that_outlives_its_kill_is_said(
    workers: NodeWorkers, monkeypatch: pytest.MonkeyPatch, together: bool
) -> None:
    said, timers = list[str](), Timers()
    monkeypatch.setattr(killed_workers, "ENDS_WITHIN_S", 0.0)
    KilledWorkers(workers, timers, JobTerminal(said.append, "host"))
    worker_id = workers.spawn(0)
    with monkeypatch.context() as patched:
        held_by_the_kernel(patched)
        if together:
            workers.signal_all(signal.SIGKILL)
        else:
            workers.kill(worker_id, "hung")
        [look] = timers.take_due(time.monotonic())
        look(time.monotonic())
    [line] = said
    assert re.search(
        r"slot 0 .* SIGKILL: process \d+ is in state [SR].*; its slot gets no other worker", line
    ), line
    workers.kill(worker_id, "hung")
    worker = workers.get(worker_id)
    assert worker is not None
    eventually(worker.process.has_ended, DEADLINE_S, "it ends")
    [look] = timers.take_due(time.monotonic())
    look(time.monotonic())
    assert said == [line], "one that has ended is no news"


def test_workers_that_are_left_behind_are_reported(
    workers: NodeWorkers, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(termination, "KILL_TIMEOUT_S", 0.2)
    workers.begin()  # one at its gate would end without a signal
    worker = workers.get(workers.spawn(0))
    assert worker is not None
    with monkeypatch.context() as patched:
        held_by_the_kernel(patched)
        assert not workers.end_all(0.0)
    assert f"process {worker.process.pid} is in state" in caplog.text and "reboot" in caplog.text
    caplog.clear()
    assert workers.end_all(0.0) and not caplog.text
