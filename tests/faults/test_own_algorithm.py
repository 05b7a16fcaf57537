"""The documents' example of an algorithm of one's own: it trains, and goes on when a worker is lost."""

from __future__ import annotations

import re
from pathlib import Path

from tests.faults.conftest import MakeJob

SCRIPT = Path(__file__).parents[2] / "examples" / "train_with_majority_vote.py"


def test_the_example_trains_through_a_loss(job: MakeJob) -> None:
    one = job(samples=6000, epochs=4, program=[str(SCRIPT)])
    node = one.start(slots=2)
    one.await_step(20)
    node.workers[1].kill()
    node.await_line("worker in slot 1 ended: killed by SIGKILL")
    one.finish()
    losses = [float(found) for found in re.findall(r"epoch \d: loss ([\d.]+)", node.log)]
    assert len(losses) == 4 and losses[-1] < 0.1, losses
    assert one.ledger.check(6000, 4) == []
    one.check_nothing_left()
