"""The example of docs/sharded-models.md, as a reader would run it, and its checkpoints with another replica size."""

from __future__ import annotations

import re
from pathlib import Path

import torch

from bagua_core import checkpoint
from tests.docs.printed import printed
from tests.faults.conftest import MakeJob
from tests.faults.job import START_S
from tests.faults.test_checkpoint import copy_of_newest, kill_whole

EXAMPLE = Path(__file__).parents[2] / "examples" / "fsdp_lm.py"
EPOCHS, STEPS = 2, 40


def test_two_shards_write_and_one_worker_goes_on(job: MakeJob, tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    given = {"4": "2", "examples/fsdp_lm.py": str(EXAMPLE)}
    *options, example = printed("docs/sharded-models.md", "--replica-size 2", given)
    size = ["--width", "112", "--blocks", "2"]
    program = [example, "--characters", "20000", "--batch", "16", "--epochs", str(EPOCHS), *size]
    one = job(program=program, options=["--checkpoint-dir", str(saved), "--checkpoint-every", "6"])
    # it must not end before it is killed
    shards = one.start(options=options, failpoints=f"commit.after=sleep:120@{STEPS - 10}")
    copy_of_newest(saved, tmp_path / "early")
    kill_whole(one)
    assert "170080 of 340160 parameters are on this worker" in shards.log
    parts = sorted(path.name for path in next((tmp_path / "early").iterdir()).iterdir())
    assert parts == [f"part-0000{part}-of-00002.safetensors" for part in range(2)]

    alone = one.start(slots=1)
    assert alone.process.wait(START_S) == 0
    alone.await_line("goes on from the checkpoint of step")
    assert "340160 of 340160 parameters are on this worker" in alone.log
    assert one.ledger.steps == STEPS
    loss = re.search(rf"epoch {EPOCHS - 1}: evaluation loss ([\d.]+)", alone.log)
    assert loss is not None and float(loss[1]) < 3.0, "it learns"
    one.check_nothing_left()

    assert checkpoint.main(["export", str(tmp_path / "early"), str(tmp_path / "out.pt")]) == 0
    (weights,) = torch.load(tmp_path / "out.pt", weights_only=True)["models"]
    assert sum(t.numel() for t in weights.values()) == 340160
