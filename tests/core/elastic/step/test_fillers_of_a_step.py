"""Whether a worker's micro-batch has fillers in place of samples, as collectives of rows ask."""

from __future__ import annotations

import pytest

from bagua_core.communication.step_interface import MicroBatch
from bagua_core.elastic.step.engine import Engine


@pytest.mark.parametrize(
    ("micro_batch", "has_fillers"),
    [
        (MicroBatch(0.5, True), False),
        (MicroBatch(0.0, True), True),  # no samples of the step, or in this micro-batch of it
        (MicroBatch(0.5, True, part=0.0), True),  # all samples of the replica are those of its other workers
    ],
    ids=["samples", "none of the step", "none of the replica"],
)
def test_fillers_are_of_a_micro_batch_in_a_step(micro_batch: MicroBatch, has_fillers: bool) -> None:
    engine = Engine(None)
    engine.boundary()
    assert not engine.has_fillers
    engine.begin_micro_batch(micro_batch)
    assert engine.has_fillers == has_fillers
    engine.reduction_done(None)
    assert engine.has_fillers == has_fillers  # behind the step's reduction too
    engine.boundary()
    assert not engine.has_fillers  # what is gathered between two steps is no filler


def test_a_step_of_a_loop_without_a_loader_has_no_fillers() -> None:
    engine = Engine(None)
    engine.begin_micro_batch(MicroBatch(0.0, True))
    engine.reduction_done(None)
    engine.next_step()
    assert engine.in_step and not engine.has_fillers
