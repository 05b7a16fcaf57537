"""Watch for: a worker is killed in the second epoch, the other one goes on, and a third joins; each epoch's accuracy.

python examples/lightning_digits.py                                 # becomes bagua-launch with two workers
bagua-launch --nproc-per-node 2 examples/lightning_digits.py        # the same

Handwritten digits by Lightning's Trainer (`pip install 'bagua-elastic[lightning]' scikit-learn`); less than a minute.
"""

import argparse
import os
import signal
import time

import lightning
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset

from lightning_bagua import BaguaStrategy


class Digits(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))

    def training_step(self, batch, index):
        x, y = batch
        return F.cross_entropy(self.layers(x), y)

    def validation_step(self, batch, index):
        x, y = batch
        right = (self.layers(x).argmax(1) == y).float().mean()
        self.log("accuracy", right, sync_dist=True, batch_size=len(y))

    def on_validation_epoch_end(self):
        accuracy = self.trainer.callback_metrics.get("accuracy")
        if self.trainer.is_global_zero and accuracy is not None and not self.trainer.sanity_checking:
            print(
                f"epoch {self.current_epoch}: {self.trainer.world_size} workers, {accuracy:.1%} right",
                flush=True,
            )

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-3)


class Fault(Callback):
    """Kills the process of the second worker, and slows the steps down so that there is time to see what follows."""

    def on_train_batch_end(self, trainer, module, outputs, batch, index):
        time.sleep(0.04)
        if trainer.global_step == 30 and trainer.global_rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=15)
    epochs = parser.parse_args().epochs
    torch.set_num_threads(1)
    images, labels = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels))
    train, validation = torch.utils.data.random_split(
        data, [1440, len(data) - 1440], generator=torch.Generator().manual_seed(0)
    )
    names = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    quiet = dict.fromkeys(names, False)
    trainer = lightning.Trainer(
        strategy=BaguaStrategy(algorithm="bytegrad"),
        accelerator="cpu",
        devices=2,
        max_epochs=epochs,
        callbacks=[Fault()],
        **quiet,
    )
    loader = DataLoader(train, batch_size=32, shuffle=True)
    trainer.fit(Digits(), loader, DataLoader(validation, batch_size=64))


if __name__ == "__main__":
    main()
