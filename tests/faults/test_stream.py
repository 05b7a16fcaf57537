"""Workers come and go while the data is a stream: every item of each epoch once, also from a checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.conftest import MakeJob
from tests.faults.test_checkpoint import copy_of_newest, kill_whole


@pytest.mark.parametrize("kind", ["plain", "state"])
def test_a_worker_is_killed_and_a_successor_comes(job: MakeJob, kind: str) -> None:
    one = job(script=["--stream", kind])
    node = one.start(slots=2)
    one.await_step(5)
    both = one.replace_killed_worker(node)
    one.await_step(both + 3)
    one.finish()
    one.check(finished=2)


def test_a_job_killed_whole_goes_on_from_its_checkpoint(job: MakeJob, tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    options = ["--checkpoint-dir", str(saved), "--checkpoint-every", "4"]
    one = job(script=["--stream", "state"], options=options)
    one.start(slots=2)
    step = copy_of_newest(saved, tmp_path / "early")
    one.await_step(step + 2)
    kill_whole(one)
    again = one.start(slots=1)
    again.await_line("goes on from the checkpoint of step")
    one.hurry()
    assert again.process.wait(60) == 0
    one.check(finished=1)
