"""The train loader of the Hugging Face integration: which micro-batches of a step count as this worker's."""

from __future__ import annotations

from typing import Any

import pytest
from torch.utils.data import DataLoader

from bagua_core.communication.step_interface import StepPlan
from tests.core.data.fake_job import FakeEngine

EIGHT = range(10, 18)


@pytest.mark.parametrize(
    ("rank", "healing", "expected"),
    [(0, [], [[10], [11], [12]]), (2, [], [[16], [17]]), (2, [2], [[10]])],
)
def test_a_steps_batches_are_those_with_samples(rank: int, healing: list[int], expected: list[Any]) -> None:
    """Eight samples on three workers, one at a time. A worker that heals has no sample: one filler has the form of a
    batch."""
    from bagua_core.integrations.huggingface.train_loader import train_loader

    loader = train_loader(
        DataLoader(EIGHT, shuffle=False, collate_fn=list),  # type: ignore[arg-type]
        8,
        seed=0,
        placed=lambda batch: batch,
        ranks_changed=lambda: None,
        max_local_batch_size=1,
    )
    engine = loader._engine = FakeEngine()  # type: ignore[assignment]
    engine.plan = StepPlan(1, 0, rank, 3, frozenset(healing))
    for _ in loader.epochs(1):
        next(iter(loader))
        break
    assert [batch[:1] for batch in loader.step_batches] == expected
