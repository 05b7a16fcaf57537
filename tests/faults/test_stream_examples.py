"""The examples of streams, as a reader runs them: a worker is killed, and each epoch has every record once."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from tests.faults.conftest import MakeJob

EXAMPLES = Path(__file__).parents[2] / "examples" / "streams"
RECORDS, EPOCHS = 1200, 6


@pytest.mark.parametrize("example", ["from_datasets.py", "from_webdataset.py", "from_litdata.py"])
def test_a_worker_is_killed_and_a_third_joins(job: MakeJob, tmp_path: Path, example: str) -> None:
    pytest.importorskip(example.removeprefix("from_").removesuffix(".py"))
    program = [str(EXAMPLES / example), "--data", str(tmp_path / "waves")]
    one = job(program=program, samples=RECORDS, epochs=EPOCHS)
    node = one.start(slots=2, environment={"HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1"})
    one.finish(deadline_s=60)
    node.await_line("worker in slot 1 ended: killed by SIGKILL")
    assert one.ledger.check(RECORDS, EPOCHS) == []
    sizes = [line.world_size for line in one.ledger.lines]
    changes = [size for before, size in pairwise([0, *sizes]) if size != before]
    assert changes == [2, 1, 2]
    assert not node.says("does not continue where state_dict was taken")
    last = [line for line in node.log.splitlines() if line.startswith(f"epoch {EPOCHS - 1}: 2 workers")]
    assert len(last) == 1 and float(last[0].split("loss ")[1]) < 0.3, "it learns"
    one.check_nothing_left()
