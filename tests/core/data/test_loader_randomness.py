"""Random numbers of the loader's processes: seeded by (seed, epoch, sample), or each worker's own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, TensorDataset

from bagua_core.data.elastic_loader import ElasticDataLoader
from tests.core.data.fake_job import FakeEngine


class Drawing(Dataset[Any]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.rand(1)


def mixing(samples: list[Any]) -> torch.Tensor:
    """As the masks of language models and mixup: drawn for the batch."""
    return torch.rand(2)


def drawn(dataset: Any, seed: int = 0, **arguments: Any) -> list[float]:
    loader = ElasticDataLoader(dataset, 2, seed=seed, shuffle=False, engine=FakeEngine(), **arguments)
    try:
        return [float(value) for _ in loader.epochs(2) for batch in loader for value in batch]
    finally:
        loader.close()


TENSORS = TensorDataset(torch.arange(4.0))


@pytest.mark.parametrize("num_workers", [0, 1, 2])
def test_a_collate_function_draws_by_the_seed_the_epoch_and_the_samples(num_workers: int) -> None:
    before = torch.get_rng_state()
    numbers = drawn(TENSORS, 1, collate_fn=mixing, num_workers=num_workers)
    assert len(set(numbers)) == len(numbers) == 8
    assert numbers == drawn(TENSORS, 1, collate_fn=mixing)
    assert set(numbers).isdisjoint(drawn(TENSORS, 2, collate_fn=mixing, num_workers=num_workers))
    assert torch.equal(torch.get_rng_state(), before), "the script's own numbers go on"


def test_unseeded_processes_draw_by_the_seed_the_scripts_and_the_worker(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def unseeded(seed: int, script_seed: int, worker: str) -> list[float]:
        monkeypatch.setenv("BAGUA_WORKER_ID", worker)
        torch.manual_seed(script_seed)
        before = torch.get_rng_state()
        found = drawn(Drawing(), seed, seed_samples=False, num_workers=1)
        assert torch.equal(torch.get_rng_state(), before)
        return found

    base = unseeded(1, 5, "node.0.a")
    assert base == unseeded(1, 5, "node.0.a")
    for other in ((2, 5, "node.0.a"), (1, 6, "node.0.a"), (1, 5, "node.1.b")):
        assert set(base).isdisjoint(unseeded(*other)), other
