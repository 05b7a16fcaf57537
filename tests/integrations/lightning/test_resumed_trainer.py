"""A trainer goes on from a checkpoint of its own at the exact place in the data: within an epoch, behind its last
batch, and behind a validation; also where the data is a stream."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

import bagua_core as bagua
from bagua_core.integrations.lightning import BaguaStrategy
from tests.integrations import stream_training as plain


class Module(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = plain.Classifier()

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        return self.model(**batch)["loss"]

    def validation_step(self, batch: Any, index: int) -> None:
        self.log("val_loss", self.model(**batch)["loss"], sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    bagua.shutdown()
    yield
    bagua.shutdown()


def train(
    data: Any, directory: Path, saved: dict[str, Any], checkpoint: Path | None = None, **more: Any
) -> tuple[dict[str, torch.Tensor], int, int]:
    bagua.shutdown()
    saver = ModelCheckpoint(dirpath=directory, save_top_k=-1, filename="{epoch}-{step}", **saved)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=1,
        strategy=BaguaStrategy(),
        max_epochs=plain.EPOCHS,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[saver],
        **more,
    )
    module, items = Module(), list(plain.Items())
    loaders = DataLoader(data, batch_size=plain.BATCH), DataLoader(items[:20], batch_size=10)
    trainer.fit(module, *loaders, ckpt_path=checkpoint)
    return module.model.state_dict(), trainer.global_step, trainer.current_epoch


@pytest.mark.parametrize("is_stream", [False, True], ids=["list", "stream"])
@pytest.mark.parametrize(
    ("saved", "more", "names"),
    [
        ({"every_n_train_steps": 5}, {}, {"epoch=0-step=5", "epoch=0-step=10", "epoch=1-step=20"}),
        ({"every_n_epochs": 1}, {}, {"epoch=0-step=10"}),
        ({"monitor": "val_loss"}, {}, {"epoch=0-step=10"}),
        ({"monitor": "val_loss"}, {"val_check_interval": 4}, {"epoch=1-step=14"}),
        ({"every_n_train_steps": 3}, {"accumulate_grad_batches": 4}, {"epoch=0-step=3"}),
    ],
    ids=["steps", "epochs", "validations", "validations-within-an-epoch", "groups"],
)
def test_it_goes_on_bit_for_bit(
    tmp_path: Path, is_stream: bool, saved: dict[str, Any], more: dict[str, Any], names: set[str]
) -> None:
    data = plain.Items() if is_stream else list(plain.Items())
    model, steps, epochs = train(data, tmp_path / "whole", saved, **more)
    written = {path.stem for path in (tmp_path / "whole").glob("*.ckpt")}
    assert names <= written
    for name in sorted(names):
        found = train(data, tmp_path / "rest", saved, tmp_path / "whole" / f"{name}.ckpt", **more)
        assert found[1:] == (steps, epochs), name
        for key, value in model.items():
            assert torch.equal(found[0][key], value), f"{key} from {name}"
