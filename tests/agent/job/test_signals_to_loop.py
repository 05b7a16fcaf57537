"""A second SIGTERM ends the workers of an agent at once, but not those of a unit of service mode, which is leaving."""

from __future__ import annotations

import math
import queue
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bagua_agent.base.messages import SignalCame
from bagua_agent.config.job_config import CommandKind, JobConfig, WorkerCommand
from bagua_agent.job.loop import JobLoop
from bagua_agent.job_state.job_state import LocalJobState
from bagua_agent.membership.view import JobView
from bagua_contract import membership_pb2 as pb


@pytest.mark.parametrize("submission", ["", "nonce-1"], ids=["by hand", "submitted"])
def test_a_second_sigterm_ends_the_workers_of_no_unit(submission: str, tmp_path: Path) -> None:
    said: list[str] = []
    workers: Any = SimpleNamespace(
        admit_to=lambda socket: None,
        worker_ids=("w",),
        output=SimpleNamespace(say=said.append, show_status=said.append),
    )
    command = WorkerCommand(CommandKind.SCRIPT, "train.py")
    some: Any = SimpleNamespace()
    loop: Any = JobLoop(
        JobConfig("job", command, submission=submission),
        *("agent", "node", "127.0.0.1", tmp_path, workers, queue.SimpleQueue(), some, some),
    )
    # as far as a leave uses what a joined job has
    loop._seen = seen = LocalJobState(pb.JobSpec(), JobView())
    loop._own_key = SimpleNamespace(leaving=lambda: None)
    loop._job = SimpleNamespace(history=SimpleNamespace(own=lambda event: None))
    loop._lifecycle = SimpleNamespace(
        leave=lambda: "at the next step boundary", ready_workers=["w"], awaits_generation=False
    )
    try:
        loop._take(SignalCame(signal.SIGTERM))
        since_s = seen.leaving_since_s
        assert since_s is not None and math.isfinite(since_s)
        loop._take(SignalCame(signal.SIGTERM))
        assert seen.leaving_since_s == (since_s if submission else -math.inf)
        assert any("the leave goes on" in line for line in said) == bool(submission), said
    finally:
        loop.close()
