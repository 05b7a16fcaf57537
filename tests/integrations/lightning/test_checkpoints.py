"""A Lightning trainer goes on from checkpoints: the job's, with another number of workers, and its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.integrations.lightning.conftest import SCRIPT
from tests.lab.wait import HANG_S
from tests.peers.conftest import launch_environment

pytestmark = pytest.mark.long


def test_a_job_that_was_stopped_in_an_epoch_goes_on_with_another_number_of_workers(
    lightning_job: Any, tmp_path: Path
) -> None:
    saved = tmp_path / "saved"
    one = lightning_job("--validate", "--test-after", samples=2400, options=["--checkpoint-dir", str(saved)])
    node = one.start(slots=2)
    one.await_step(7)
    node.send(signal.SIGTERM)
    assert node.process.wait(40) == 143
    stopped = one.step
    assert 7 <= stopped < one.samples // 24
    one.start(slots=1)
    one.finish(codes=[143, 0])
    (end,) = one.check_trainers(finished=1)
    assert one.ledger.lines[-1].world_size == 1
    assert end["seen"] == end["tested"] == 50.0


def test_a_checkpoint_of_the_trainer_is_gone_on_from_bit_for_bit(tmp_path: Path) -> None:
    whole, rest = tmp_path / "whole", tmp_path / "rest"
    train(whole)
    train(rest, "--resume", str(whole / "checkpoints" / "epoch=0-step=2.ckpt"))
    assert end_of(whole) == end_of(rest)


def test_a_script_started_by_python_starts_its_own_workers(tmp_path: Path) -> None:
    out = tmp_path / "out"
    train(out, "--devices", "2", "--test-after")
    ends = [json.loads(path.read_text()) for path in (out / "ends").iterdir()]
    assert len(ends) == 2
    assert {(end["batches"], end["seen"], end["tested"]) for end in ends} == {(8, 50.0, 50.0)}
    assert all(end["predicted_labels"] == end["labels"] for end in ends), "each worker predicts all samples"
    assert len({end["parameters"] for end in ends}) == 1


def train(out: Path, *words: str) -> None:
    out.mkdir()
    (out / "hurry").touch()
    subprocess.run(
        [
            sys.executable,
            str(SCRIPT),
            "--out",
            str(out),
            "--samples",
            "96",
            "--validate",
            "--accumulate",
            "3",
            *words,
        ],
        env=launch_environment(out, OMP_NUM_THREADS="1", PATH=os.environ["PATH"]),
        timeout=HANG_S,
        check=True,
    )


def end_of(out: Path) -> dict[str, Any]:
    (path,) = (out / "ends").iterdir()
    end: dict[str, Any] = json.loads(path.read_text())
    return end
