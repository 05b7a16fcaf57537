"""What a node's part of a job ends with where its loop is left by an exception."""

from __future__ import annotations

import logging
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from bagua_agent.base.errors import JobReplaced
from bagua_agent.base.signals import SignalsToInbox
from bagua_agent.config.job_config import CommandKind, JobConfig, WorkerCommand
from bagua_agent.job import loop
from bagua_agent.job.run import MOST_RETURNS, run_job
from bagua_agent.node.node_workers import NodeWorkers
from bagua_agent.workers.output.router import OutputRouter

LIMIT_S = 20.0


@pytest.mark.parametrize("asked", [False, True], ids=["not asked to leave", "asked to leave"])
def test_a_node_that_was_asked_to_leave_does_not_join_a_job_anew(
    asked: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    runs = 0

    class Loop:
        def __init__(self, *arguments: Any) -> None:
            (self.signals,) = (a for a in arguments if isinstance(a, SignalsToInbox))

        def run(self) -> int:
            nonlocal runs
            runs += 1
            if asked:
                os.kill(os.getpid(), signal.SIGTERM)
                self.signals.wait(LIMIT_S)
            if runs <= MOST_RETURNS:
                raise JobReplaced("etcd came back empty")
            return 0

        def close(self) -> None:
            pass

    monkeypatch.setattr(loop, "JobLoop", Loop)
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("")
    config = JobConfig("job", WorkerCommand(CommandKind.SCRIPT, "train.py", ()), endpoints=("127.0.0.1:1",))
    code = run_job(config)
    said = capfd.readouterr().err
    if asked:
        assert (code, runs) == (128 + signal.SIGTERM, 1)
        assert "etcd came back empty; this node was asked to leave, and does not join again" in said
    else:
        assert (code, runs) == (0, MOST_RETURNS + 1)
        assert said.count("etcd came back empty; joining again") == MOST_RETURNS


def test_a_signal_while_a_node_puts_its_things_away_does_not_end_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Loop:
        def __init__(self, *arguments: Any) -> None:
            pass

        def run(self) -> int:
            return 3

        def close(self) -> None:
            pass

    heard: list[bool] = []
    close = NodeWorkers.close

    def asked_again(self: NodeWorkers) -> None:
        heard.append(signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL)
        if heard[-1]:
            os.kill(os.getpid(), signal.SIGTERM)
        close(self)

    monkeypatch.setattr(loop, "JobLoop", Loop)
    monkeypatch.setattr(NodeWorkers, "close", asked_again)
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("")
    config = JobConfig("job", WorkerCommand(CommandKind.SCRIPT, "train.py", ()), endpoints=("127.0.0.1:1",))
    assert run_job(config) == 3
    assert heard == [True]


def test_what_is_logged_while_workers_are_put_away_goes_through_their_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Standard error may be a pipe whose reader pauses, and the thread of the output must not wait for it."""
    said: list[str] = []

    class Loop:
        def __init__(self, *_: Any) -> None: ...

        def run(self) -> int:
            return 0

        def close(self) -> None: ...

    def close(workers: NodeWorkers) -> None:
        logging.getLogger("bagua_agent.some_part").warning("put away")
        put_away(workers)

    def say(router: OutputRouter, line: str) -> bool:
        said.append(line)
        return True

    put_away = NodeWorkers.close
    monkeypatch.setattr(NodeWorkers, "close", close)
    monkeypatch.setattr(OutputRouter, "say_if_open", say)
    monkeypatch.setattr(loop, "JobLoop", Loop)
    monkeypatch.setattr(logging.getLogger(), "handlers", [])  # as in a process of its own
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("")
    assert (
        run_job(
            JobConfig("job", WorkerCommand(CommandKind.SCRIPT, "train.py", ()), endpoints=("127.0.0.1:1",))
        )
        == 0
    )
    assert "bagua-launch: put away" in said
