"""The runtime's own tensors stay on the CPU under torch's default device. Here that is "meta": what lies there by
mistake has no values, so it shows without a GPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, RandomSampler, SubsetRandomSampler

from bagua_core.data.balancing.replica_order import side_by_side
from bagua_core.data.elastic_loader import ElasticDataLoader
from bagua_core.data.partition import epoch_order
from bagua_core.elastic.state import flat_digest
from bagua_core.elastic.state.state_codec import from_bytes, to_bytes
from bagua_core.integrations.evaluation_batches import SharedBatches
from tests.core.data.fake_job import FakeEngine
from tests.core.defaults import default_device
from tests.lab.launched import launch


class Rows(Dataset[torch.Tensor]):
    """Of a data set that was read on the CPU."""

    rows = torch.arange(24).reshape(12, 2)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.rows[index]


def loader_of(data: Dataset[torch.Tensor], **arguments: Any) -> ElasticDataLoader:
    engine: Any = FakeEngine()
    return ElasticDataLoader(data, 4, seed=3, engine=engine, **arguments)


def drawn(**arguments: Any) -> list[list[list[int]]]:
    return [batch.tolist() for batch in loader_of(Rows(), **arguments)]


def rows_side_by_side() -> list[list[int]]:
    return side_by_side(
        [3.0, 1.0, 2.0, 5.0, 4.0], 2, seed=1, epoch=0, shuffle=True, drop_last=False, random_level=0.5
    )


def digest() -> int:
    flat_digest._weights.cache_clear()
    return flat_digest.digest_of_bytes([torch.arange(100, dtype=torch.uint8, device="cpu")])


@pytest.mark.parametrize(
    "act",
    [
        lambda: epoch_order(1, 0, 9, shuffle=True).tolist(),
        lambda: epoch_order(1, 0, 9, shuffle=False).tolist(),
        rows_side_by_side,
        digest,
        lambda: from_bytes(to_bytes({"a": 1, "b": "two"})),
        drawn,
        lambda: drawn(num_workers=1),
        lambda: drawn(sampler=SubsetRandomSampler(range(12))),
        lambda: drawn(sampler=RandomSampler(Rows())),
        lambda: list(SharedBatches(RandomSampler(Rows()), 3, lambda: (0, 2))),
        lambda: list(SharedBatches(SubsetRandomSampler(range(12)), 3, lambda: (0, 2))),
    ],
    ids=lambda act: act.__name__ if act.__name__ != "<lambda>" else None,
)
def test_it_changes_nothing(act: Callable[[], Any]) -> None:
    expected = act()
    with default_device("meta"):
        assert act() == expected


def test_what_a_worker_reads_itself_goes_to_the_default_device() -> None:
    class Made(Rows):
        def __getitem__(self, index: int) -> torch.Tensor:
            return torch.tensor([index])

    with default_device("meta"):
        batch = next(iter(loader_of(Made())))
    assert batch.device.type == "meta"


SCRIPT = """
import torch
torch.set_default_device("meta")
torch.set_default_dtype(torch.bfloat16)
import bagua_core as bagua

bagua.init_process_group()
print("word", bagua.broadcast_object("hello" if bagua.get_rank() == 0 else None), flush=True)
model = torch.nn.Linear(2, 1, device="cpu")
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
model = bagua.DistributedDataParallel(model, optimizers=[optimizer])
with torch.device("cpu"):
    rows = torch.randn(32, 2)
loader = bagua.ElasticDataLoader(rows, global_batch_size=4, seed=0)
for epoch in loader.epochs({epochs}):
    for x in loader:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    bagua.barrier()
    print("epoch", epoch, "step", loader.step, flush=True)
"""


def test_a_job_trains_and_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    for epochs, workers in ((1, "2"), (2, "1")):
        (tmp_path / "train.py").write_text(SCRIPT.format(epochs=epochs))
        words = ("--standalone", "--nproc-per-node", workers, "--checkpoint-dir", "kept", "train.py")
        ended = launch(*words, directory=tmp_path)
        assert ended.returncode == 0, ended.said
        assert ended.said.count("word hello") == int(workers), ended.said
        assert f"epoch {epochs - 1} step {8 * epochs}" in ended.said
    assert "epoch 0" not in ended.said, "it began anew"
