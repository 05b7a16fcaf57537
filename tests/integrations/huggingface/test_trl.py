"""TRL's SFTTrainer as an elastic job, by inheritance: it trains as in one process, over a loss and a join."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.faults.job import Job
from tests.lab.wait import HANG_S
from tests.peers.conftest import launch_environment

SCRIPT = Path(__file__).with_name("train_sft.py")
SAMPLES, EPOCHS = 97, 2  # 6 batches of 16 in an epoch, and one of a single row


@pytest.mark.long
def test_a_worker_is_lost_and_another_joins(tmp_path: Path) -> None:
    pytest.importorskip("trl", reason="pip install -e '.[frameworks]' brings it")
    pytest.importorskip("datasets", reason="pip install -e '.[frameworks]' brings it")
    one = Job(tmp_path, samples=SAMPLES, epochs=EPOCHS, program=[str(SCRIPT), "--out", str(tmp_path / "out")])
    try:
        node = one.start(slots=2, environment={"HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1"})
        one.finish(deadline_s=120)
    finally:
        one.end()
    assert (one.out / "has-died").exists() and node.says("worker in slot 1 ended: killed by SIGKILL")
    assert one.ledger.check(SAMPLES, EPOCHS) == [], "every row once in an epoch"
    ends = [torch.load(path) for path in sorted(one.out.glob("*.pt"))]
    assert len(ends) == 2
    environment = launch_environment(
        tmp_path,
        OMP_NUM_THREADS="1",
        PATH=os.environ["PATH"],
        HF_HUB_OFFLINE="1",
        HF_HOME=str(tmp_path / "home"),
    )
    words = [sys.executable, str(SCRIPT), "--out", str(tmp_path), "--plain"]
    subprocess.run(words, env=environment, timeout=HANG_S, check=True)
    alone = torch.load(tmp_path / "plain.pt")
    assert len(alone["losses"]) == EPOCHS * 7
    for end in ends:
        torch.testing.assert_close(end["losses"], alone["losses"], rtol=1e-4, atol=1e-5)
        for name, value in alone["model"].items():
            torch.testing.assert_close(end["model"][name], value, rtol=1e-4, atol=1e-5)
    one.check_nothing_left()
