"""Stock DDP that saves a snapshot after each epoch and goes on from it, as scripts for torchrun do."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import ending_once
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

EPOCHS = 4


def main(out: Path) -> None:
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(64, 8), torch.randn(64, 1))
    sampler: DistributedSampler[tuple[torch.Tensor, ...]] = DistributedSampler(data, seed=1)
    loader = DataLoader(data, batch_size=4, sampler=sampler)
    module = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
    snapshot, first = out / "snapshot.pt", 0
    if snapshot.exists():
        saved = torch.load(snapshot)
        module.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        first = saved["epoch"]
    model = DistributedDataParallel(module)
    for epoch in range(first, EPOCHS):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
        if rank == 0:
            state = {"model": module.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch + 1}
            torch.save(state, out / "snapshot.tmp")
            (out / "snapshot.tmp").rename(snapshot)
        dist.barrier()
        ending_once.here(out, rank, epoch + 1)
    if rank == 0:
        torch.save(module.state_dict(), out / "result.pt")
    dist.destroy_process_group()


main(Path(sys.argv[1]))
