"""Watch for: a worker is killed in the second epoch, the other one goes on, and a third joins; each epoch's accuracy.

bagua-launch --nproc-per-node 2 examples/accelerate_digits.py

Handwritten digits by a loop of accelerate's (`pip install 'bagua-elastic[huggingface]' scikit-learn`); less than a
minute.
"""

import argparse
import os
import signal
import time

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset

from bagua_core.integrations.huggingface import ElasticAccelerator


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
    accelerator = ElasticAccelerator("bytegrad", cpu=True)
    module = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))
    adam = torch.optim.AdamW(module.parameters(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(adam, epochs * 1440 // 64)
    model, optimizer, loader, evaluation, scheduler = accelerator.prepare(
        module,
        adam,
        DataLoader(train, batch_size=64, shuffle=True),
        DataLoader(validation, batch_size=64),
        schedule,
    )
    for epoch in loader.epochs(epochs):
        for x, y in loader:
            accelerator.backward(F.cross_entropy(model(x), y))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            time.sleep(0.06)  # there is time to see what follows
            if loader.step == 30 and accelerator.process_index == 1:
                os.kill(os.getpid(), signal.SIGKILL)
        with torch.no_grad():
            right = [accelerator.gather_for_metrics(model(x).argmax(1) == y) for x, y in evaluation]
        accelerator.print(
            f"epoch {epoch}: {accelerator.num_processes} workers, {torch.cat(right).float().mean():.1%} right",
            flush=True,
        )


if __name__ == "__main__":
    main()
