"""bagua.shutdown() in a job: ends it on all workers, with every step committed, and a second training is refused."""

from __future__ import annotations

from pathlib import Path

from tests.faults.conftest import MakeJob

SCRIPT = Path(__file__).with_name("train_and_shut_down.py")


def test_a_worker_that_shuts_down_ends_its_part_and_is_refused_another_training(job: MakeJob) -> None:
    one = job(program=[str(SCRIPT)], samples=96, epochs=1)
    node = one.start(slots=2)
    assert node.process.wait(90) == 0, node.log
    assert node.log.count("launched") == 2
    assert node.log.count("refused: this worker called bagua.shutdown(), which ends its job") == 2
    committed = {(line.step, line.global_rank) for line in one.ledger.lines}
    assert committed == {(step, rank) for step in range(1, 7) for rank in (0, 1)}
    one.check_nothing_left()
