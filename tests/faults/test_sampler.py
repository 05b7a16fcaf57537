"""Workers come and go while a sampler gives the order: every sample of it once, and the order stays the sampler's."""

from __future__ import annotations

import itertools

from bagua_core.data.partition import epoch_order
from tests.faults.conftest import MakeJob
from tests.faults.job import BATCH, EPOCHS, SAMPLES


def test_a_worker_is_killed_and_a_successor_comes(job: MakeJob) -> None:
    one = job(script=["--sampler"])
    node = one.start(slots=2)
    one.await_step(5)
    both = one.replace_killed_worker(node)
    one.await_step(both + 3)
    one.finish()
    one.check(finished=2)
    by_step: dict[int, list[list[int]]] = {}
    for line in sorted(one.ledger.lines, key=lambda line: (line.step, line.global_rank)):
        by_step.setdefault(line.step, []).append(list(line.samples))
    batches = [list(itertools.chain(*by_step[step])) for step in sorted(by_step)]
    per_epoch = SAMPLES // BATCH
    for epoch in range(EPOCHS):
        order = list(itertools.chain(*batches[epoch * per_epoch : (epoch + 1) * per_epoch]))
        assert sorted(order) == list(range(SAMPLES))
        assert order != epoch_order(1, epoch, SAMPLES, True).tolist(), "the loader's own order"
