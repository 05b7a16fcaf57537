"""A stock torchrun script: FSDP2. Watch for: after a loss the processes start again, at the step that was saved last.

    bagua-launch --nnodes 1:4 --nproc-per-node 2 --max-restarts 3 examples/stock_fsdp2.py

Nothing of Bagua is in it: `fully_shard` and torch.distributed.checkpoint. A small transformer learns to copy its input
reversed. Each process keeps a shard of the parameters; the sharded checkpoint is read again by any number of processes,
so a change of membership costs a start and a load.
"""

from __future__ import annotations

import argparse
import os
import shutil
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.fsdp import fully_shard

VOCABULARY = 32
LENGTH = 16


class Reverser(nn.Module):
    """Tokens (batch, LENGTH) in, the mean loss of telling them backwards out."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, 64)
        self.place = nn.Parameter(torch.zeros(LENGTH, 64))
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True) for _ in range(2)
        )
        self.head = nn.Linear(64, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.token(tokens) + self.place
        for layer in self.layers:
            hidden = layer(hidden)
        return F.cross_entropy(self.head(hidden).flatten(0, 1), tokens.flip(1).flatten())


def newest(directory: Path) -> Path | None:
    """The last checkpoint that was written whole: a finished one has its metadata."""
    whole = [d for d in directory.glob("step-*") if (d / ".metadata").exists()]
    return max(whole, key=lambda d: int(d.name.split("-")[1]), default=None)


@record
def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch-size", type=int, default=32, help="of each process")
    parser.add_argument("--checkpoint-dir", type=Path, default=Path("reverser"))
    parser.add_argument("--every", type=int, default=20, help="steps between checkpoints")
    args = parser.parse_args()

    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    if cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = Reverser().to("cuda" if cuda else "cpu")
    mesh = init_device_mesh("cuda" if cuda else "cpu", (world,))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    step = 0
    found = newest(args.checkpoint_dir)
    if found is not None:
        weights, moments = get_state_dict(model, optimizer)
        dcp.load({"model": weights, "optimizer": moments}, checkpoint_id=found)
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
        step = int(found.name.split("-")[1])
    if rank == 0:
        print(f"from step {step} with {world} processes", flush=True)
    while step < args.steps:
        generator = torch.Generator().manual_seed(step * 10_007 + rank)
        tokens = torch.randint(VOCABULARY, (args.batch_size, LENGTH), generator=generator)
        tokens = tokens.to("cuda" if cuda else "cpu")
        optimizer.zero_grad()
        loss = model(tokens)
        loss.backward()
        optimizer.step()
        step += 1
        if step % args.every == 0 or step == args.steps:
            weights, moments = get_state_dict(model, optimizer)
            target = args.checkpoint_dir / f"step-{step}"
            dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=target)
            if rank == 0:
                print(f"step {step} loss {loss.item():.3f} with {world} processes", flush=True)
                for old in args.checkpoint_dir.glob("step-*"):
                    if int(old.name.split("-")[1]) < step - args.every:
                        shutil.rmtree(old)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
