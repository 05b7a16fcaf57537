"""Notes told apart by their spectrograms, which are computed once. Watch the misses: they are in the first epoch.

python examples/cached_dataset.py                                # one process
bagua-launch --nproc-per-node 2 examples/cached_dataset.py       # two, which share what either has computed

python examples/cached_dataset.py --backend redis                # in a redis-server that is started for it
python examples/cached_dataset.py --backend redis --host 10.0.0.5:6379 --host 10.0.0.6:6379
"""

import argparse
import time

import torch
import torch.nn.functional as F
from torch import nn

import bagua_core as bagua

NOTES, RATE = 12, 16_000


class Spectrograms(torch.utils.data.Dataset):
    """Half a second of a noisy note with overtones; the same for an index every time, and slow to compute."""

    def __init__(self, length):
        self.length = length
        self.times = torch.arange(RATE // 2) / RATE

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        if index >= self.length:
            raise IndexError(index)
        own = torch.Generator().manual_seed(index)
        note = index % NOTES
        phase, strength = torch.rand(2, 8, generator=own)
        frequency = 220 * 2 ** (note / 12) * torch.arange(1, 9)
        wave = (
            strength[:, None] * torch.sin(6.2832 * (frequency[:, None] * self.times + phase[:, None]))
        ).sum(0)
        wave += torch.randn(wave.shape, generator=own)
        parts = [
            wave.stft(n, n // 4, window=torch.hann_window(n), return_complex=True) for n in (512, 1024, 2048)
        ]
        return torch.cat([part.abs().log1p().mean(1) for part in parts]), note


def augmented(sample):
    """Behind the cache, so that it is another one every time."""
    spectrum, note = sample
    return spectrum * (1 + 0.1 * torch.randn(1)), note


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--samples", type=int, default=1200)
    parser.add_argument("--num-workers", type=int, default=2)
    parser.add_argument("--backend", default="embedded")
    parser.add_argument("--host", action="append", help="of a running Redis")
    arguments = parser.parse_args()

    bagua.init_process_group()
    torch.manual_seed(0)
    options = {"hosts": arguments.host} if arguments.host else {}
    dataset = bagua.CachedDataset(
        Spectrograms(arguments.samples),
        arguments.backend,
        dataset_name="notes",
        fingerprint="stft-1",  # to be changed with what is computed
        transform=augmented,
        **options,
    )
    loader = bagua.ElasticDataLoader(dataset, 40, seed=0, num_workers=arguments.num_workers)
    width = dataset[0][0].numel()
    network = nn.Sequential(nn.BatchNorm1d(width), nn.Linear(width, 64), nn.ReLU(), nn.Linear(64, NOTES))
    optimizer = torch.optim.Adam(network.parameters(), 1e-3)
    model = bagua.DistributedDataParallel(network, optimizers=[optimizer])

    before = dataset.stats()
    start = time.monotonic()
    for epoch in loader.epochs(arguments.epochs):
        for spectra, notes in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(spectra), notes)
            loss.backward()
            optimizer.step()
        stats = dataset.stats()
        hits, misses = stats.hits - before.hits, stats.misses - before.misses
        if bagua.get_rank() == 0:
            took = time.monotonic() - start
            print(
                f"epoch {epoch}: {took:.2f} s, loss {loss.item():.2f}, {hits} hits, {misses} misses",
                flush=True,
            )
        before, start = stats, time.monotonic()


if __name__ == "__main__":
    main()
