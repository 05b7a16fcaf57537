"""The examples of handwritten digits, as a reader runs them: a worker is killed, and each epoch has each image once."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path

import pytest

from tests.faults.conftest import MakeJob

EXAMPLES = Path(__file__).parents[2] / "examples"
IMAGES, EPOCHS = 1440, 4
LOST_AT = 30
VIT = "transformers.trainer,transformers.models.vit.modeling_vit"


@pytest.mark.parametrize(
    ("example", "package", "imports", "failpoint"),
    [
        ("digits.py", "sklearn", "sklearn.datasets", f"step.begin=kill@{LOST_AT}#1"),
        # these kill a worker themselves
        ("lightning_digits.py", "lightning", "sklearn.datasets,lightning", ""),
        ("accelerate_digits.py", "accelerate", "sklearn.datasets,accelerate", ""),
        ("transformers_digits.py", "transformers", f"sklearn.datasets,{VIT}", ""),
    ],
)
def test_a_worker_is_killed_and_the_other_learns_on(
    job: MakeJob, example: str, package: str, imports: str, failpoint: str
) -> None:
    pytest.importorskip("sklearn")
    pytest.importorskip(package)
    program = [str(EXAMPLES / example), "--epochs", str(EPOCHS)]
    one = job(program=program, samples=IMAGES, epochs=EPOCHS, imports=imports)
    node = one.start(slots=2, failpoints=failpoint)
    one.finish(deadline_s=90)
    node.await_line("worker in slot 1 ended: killed by SIGKILL", "starting another")
    assert not node.says("fresh interpreter"), "a worker's start is a fork"
    assert one.ledger.check(IMAGES, EPOCHS) == []
    sizes = [line.world_size for line in one.ledger.lines]
    changes = [size for before, size in pairwise([0, *sizes]) if size != before]
    assert changes in ([2, 1], [2, 1, 2]), "the third worker comes before the end, or not"
    assert [line.world_size for line in one.ledger.lines if line.step == LOST_AT - 1] == [2, 2]
    right = re.findall(r"(\d+\.\d)% right|'eval_right': '?(0\.\d+)", node.log)
    assert len(right) == EPOCHS, "each epoch is evaluated once"
    assert max(float(right[-1][0] or 0), 100 * float(right[-1][1] or 0)) > 40, (
        "it learns: at random it would be 10 %"
    )
    one.check_nothing_left()
