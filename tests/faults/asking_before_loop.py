"""Asks for ranks and collectives before its loop. Writes what it got to <out>/before-SLOT-PID.json, then trains.

What it gets at the top of an epoch is in <out>/epoch-EPOCH-SLOT-PID.json. Files in <out> change the script: rank 0
"downloads" while `hold-download` is there; with `odd` rank 1 skips the barrier.
"""

import argparse
import json
import os
import time
from pathlib import Path

import torch

import bagua_core as bagua

parser = argparse.ArgumentParser()
parser.add_argument("--out", type=Path, required=True)
parser.add_argument("--samples", type=int)
parser.add_argument("--epochs", type=int)
parser.add_argument(
    "--gathers", action="store_true", help="also asks for something that has a part of each worker"
)
args = parser.parse_args()
torch.set_num_threads(1)


def held_by(name: str) -> None:
    while (args.out / name).exists():
        time.sleep(0.02)


bagua.init_process_group(seed=3)
rank, world = bagua.get_rank(), bagua.get_world_size()
place = f"{os.environ['BAGUA_SLOT']}-{os.getpid()}"
downloaded = False
if rank == 0:
    (args.out / f"downloads-{place}").touch()
    held_by("hold-download")
    (args.out / "data").write_text("the data")
    downloaded = True
if not ((args.out / "odd").exists() and rank == 1):
    bagua.barrier()
found = (args.out / "data").exists()
shared = bagua.broadcast_object({"run": place} if rank == 0 else None)
total = int(bagua.allreduce(torch.tensor([rank + 1])))
if args.gathers:
    bagua.allgather(torch.tensor([rank]))
told = {
    "rank": rank,
    "world": world,
    "downloaded": downloaded,
    "found": found,
    "shared": shared,
    "total": total,
}
(args.out / f"before-{place}.json").write_text(json.dumps(told))

module = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
model = bagua.DistributedDataParallel(module, [optimizer])
samples = torch.utils.data.TensorDataset(torch.ones(args.samples, 4))
loader = bagua.ElasticDataLoader(samples, global_batch_size=12, seed=0)
for epoch in loader.epochs(args.epochs):
    rank = bagua.get_rank()
    named = bagua.broadcast_object(f"{place} in epoch {epoch}" if rank == 0 else None)
    ones = int(bagua.allreduce(torch.ones(1)))
    (args.out / f"epoch-{epoch}-{place}.json").write_text(json.dumps({"named": named, "ones": ones}))
    for (x,) in loader:
        optimizer.zero_grad()
        model(x).mean().backward()
        optimizer.step()
        if not (args.out / "hurry").exists():
            time.sleep(0.4)
(args.out / f"end-{place}.json").write_text(
    json.dumps({"rank": bagua.get_rank(), "w": module.weight.tolist()})
)
