"""A worker that means harm to its agent, which may be root: what it leaves behind costs the agent nothing."""

from __future__ import annotations

import logging
import os
import queue
import stat
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from bagua_agent.config.job_config import CommandKind, JobConfig, WorkerCommand
from bagua_agent.node.node_workers import NodeWorkers
from bagua_agent.workers.exits.exit_cause import TAIL_LINE_CHARACTERS, ExitCause, exit_cause

DEADLINE_S = 30.0
Run = Callable[[str], ExitCause]


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    """Runs a shell program as a worker; says why it ended."""
    exits: queue.SimpleQueue[tuple[str, int]] = queue.SimpleQueue()
    made: list[NodeWorkers] = []
    runtime = tmp_path / "runtime"
    runtime.mkdir()

    def run(program: str) -> ExitCause:
        command = WorkerCommand(CommandKind.EXECUTABLE, "sh", ("-c", program))
        config = JobConfig("job", command, log_dir=str(tmp_path / "logs"), redirects="3")
        workers = NodeWorkers(config, "agent", "node", "127.0.0.1", runtime, lambda *ended: exits.put(ended))
        made.append(workers)
        workers.start()
        workers.begin()
        return workers.ended(*exits.get(timeout=DEADLINE_S))[1]

    yield run
    for workers in made:
        workers.close()


@pytest.mark.parametrize(
    ("leaves", "said"),
    [
        ('truncate -s 256M "$BAGUA_ERROR_FILE"', "it has 268435456 bytes, more than 1048576"),
        ('rm -f "$BAGUA_ERROR_FILE"; mkfifo "$BAGUA_ERROR_FILE"', "it is a FIFO, no ordinary file"),
        ('ln -sf /dev/zero "$BAGUA_ERROR_FILE"', "it is a symbolic link, no ordinary file"),
    ],
)
def test_an_error_file_that_is_none(
    run: Run, caplog: pytest.LogCaptureFixture, leaves: str, said: str
) -> None:
    tracemalloc.start()
    try:
        with caplog.at_level(logging.WARNING):
            cause = run(f"{leaves}; exit 3")
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert (cause.exit_code, cause.summary, cause.script_failure) == (3, "exit code 3", True)
    assert said in caplog.text and "error.json is not used" in caplog.text
    assert peak_bytes < 16 << 20


def test_an_error_file_that_no_parser_survives() -> None:
    assert exit_cause(3, "[" * 200_000).summary == "exit code 3"


def test_a_traceback_of_one_endless_line_fits_in_a_record() -> None:
    cause = exit_cause(1, stderr_tail="\n".join(["x" * 1_000_000] * 30))
    assert len(cause.traceback_tail) < 21 * TAIL_LINE_CHARACTERS


def test_what_goes_wrong_before_anything_was_started_is_what_is_told(tmp_path: Path) -> None:
    command = WorkerCommand(CommandKind.SCRIPT, "x" * 5000)
    exits: list[tuple[str, int]] = []
    config = JobConfig("job", command, log_dir=str(tmp_path / "logs"))
    workers = NodeWorkers(config, "agent", "node", "127.0.0.1", tmp_path, lambda *ended: exits.append(ended))
    workers.close()  # "cannot join thread before it is started" took the place of the error that led here


def test_no_other_account_may_read_what_workers_print(run: Run, tmp_path: Path) -> None:
    umask = os.umask(0o022)
    try:
        run("echo out; echo err >&2")
    finally:
        os.umask(umask)
    found = {
        p.relative_to(tmp_path / "logs/job"): stat.S_IMODE(p.stat().st_mode)
        for p in tmp_path.glob("logs/job/**/*")
    }
    assert {path.name for path in found} >= {"stdout.log", "stderr.log"}
    assert all(
        mode == (0o750 if (tmp_path / "logs/job" / path).is_dir() else 0o640) for path, mode in found.items()
    )
