"""A stock torchrun script: DDP. Watch for: after a loss the processes start again, at the epoch that was saved last.

    bagua-launch --nnodes 1:4 --nproc-per-node 2 --max-restarts 3 examples/stock_ddp.py

Nothing of Bagua is in it: plain DistributedDataParallel, its own sampler, its own checkpoint. It fits a small network
to a noisy spiral. Each change of membership starts its processes again; they go on from the last checkpoint, as under
torchrun, only sooner.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def spiral(samples: int) -> TensorDataset:
    """Two interleaved arms in the plane: `samples` points and the arm each is from."""
    generator = torch.Generator().manual_seed(0)
    radius = torch.rand(samples, generator=generator)
    arm = torch.randint(0, 2, (samples,), generator=generator)
    angle = 6.0 * radius + torch.pi * arm
    points = torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1)
    return TensorDataset(points + 0.02 * torch.randn(samples, 2, generator=generator), arm)


def save(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, epoch: int) -> None:
    """Written beside and renamed, so that a reader never sees half of it."""
    half = path.with_suffix(".half")
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}, half)
    half.replace(path)


@record
def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=64, help="of each process")
    parser.add_argument("--checkpoint", type=Path, default=Path("spiral.pt"))
    parser.add_argument("--pause", type=float, default=0.0, help="seconds added to each epoch")
    args = parser.parse_args()

    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    torch.manual_seed(0)
    model = DistributedDataParallel(
        nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2)).to(device)
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    first = 0
    if args.checkpoint.exists():
        saved = torch.load(args.checkpoint, map_location=device, weights_only=True)
        model.module.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        first = saved["epoch"] + 1
    data = spiral(4096)
    sampler: DistributedSampler[object] = DistributedSampler(data)
    loader = DataLoader(data, args.batch_size, sampler=sampler)
    world = dist.get_world_size()
    if dist.get_rank() == 0:
        print(f"from epoch {first} with {world} processes", flush=True)
    for epoch in range(first, args.epochs):
        sampler.set_epoch(epoch)
        for points, arm in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(points.to(device)), arm.to(device))
            loss.backward()
            optimizer.step()
        time.sleep(args.pause)
        if dist.get_rank() == 0:
            save(args.checkpoint, model.module, optimizer, epoch)
            print(f"epoch {epoch} loss {loss.item():.4f} with {world} processes", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
