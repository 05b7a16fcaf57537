"""Lightning's Trainer with strategy="ddp", going on from its last checkpoint."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import ending_once
import lightning
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint

EPOCHS = 4


class Regression(lightning.LightningModule):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        x, y = batch
        return torch.nn.functional.mse_loss(self.layers(x), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class Ends(Callback):  # type: ignore[misc]
    def __init__(self, out: Path) -> None:
        self._out = out

    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        ending_once.here(self._out, trainer.global_rank, trainer.current_epoch)


def main(out: Path) -> None:
    lightning.seed_everything(0, verbose=False)
    data = torch.utils.data.TensorDataset(torch.randn(64, 8), torch.randn(64, 1))
    loader = torch.utils.data.DataLoader(data, batch_size=4)
    model = Regression()
    trainer = lightning.Trainer(
        accelerator="cpu",
        strategy="ddp",
        devices=2,
        max_epochs=EPOCHS,
        callbacks=[ModelCheckpoint(dirpath=out, save_last=True), Ends(out)],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    last = out / "last.ckpt"
    trainer.fit(model, loader, ckpt_path=str(last) if last.exists() else None, weights_only=False)
    if trainer.is_global_zero:
        torch.save(model.state_dict(), out / "result.pt")


main(Path(sys.argv[1]))
