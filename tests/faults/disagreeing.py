"""Trains a little; at one step, rank `odd` does something else than the others."""

import argparse
import os
from pathlib import Path

import torch

import bagua_core as bagua

parser = argparse.ArgumentParser()
parser.add_argument("what", choices=["collective", "leaves", "exits", "skips", "stream", "twice", "model"])
parser.add_argument("--did", type=Path, help="file to make when rank 1 is about to do something else")
parser.add_argument("--at", type=int, default=5)
args = parser.parse_args()

torch.set_num_threads(1)
module: torch.nn.Module = torch.nn.Linear(4, 2)
if args.what == "skips":  # its forwards wait for one another too
    module = torch.nn.Sequential(module, torch.nn.BatchNorm1d(2))
optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
model = bagua.DistributedDataParallel(module, [optimizer])
if args.what == "model":  # of another size
    other: torch.nn.Module = torch.nn.Linear(4, 7)
    other_optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    other = bagua.DistributedDataParallel(other, [other_optimizer])
samples = torch.utils.data.TensorDataset(torch.randn(64, 4), torch.randn(64, 2))


class Stream(torch.utils.data.IterableDataset):
    """Ends early on the worker of slot 1."""

    def __iter__(self):
        for index in range(64):
            if index == 4 * args.at and os.environ["BAGUA_SLOT"] == "1":
                args.did.touch()
                return
            yield torch.full((4,), float(index)), torch.zeros(2)


loader = bagua.ElasticDataLoader(Stream() if args.what == "stream" else samples, global_batch_size=4, seed=0)
for step, (x, y) in enumerate(loader):  # the one whose stream ends waits here
    optimizer.zero_grad()
    if args.what == "skips" and step == args.at and bagua.get_rank() == 1:
        args.did.touch()
        model(x)
        continue
    if args.what == "twice" and step == args.at and bagua.get_rank() == 1:
        args.did.touch()
        torch.nn.functional.mse_loss(model(x), y).backward()
    if args.what == "model" and step == args.at and bagua.get_rank() == 1:
        args.did.touch()
        other(x).square().mean().backward()
        other_optimizer.step()
    torch.nn.functional.mse_loss(model(x), y).backward()  # the others wait here
    optimizer.step()
    if args.what != "stream" and step == args.at and bagua.get_rank() == 1:
        if args.did is not None:
            args.did.touch()
        if args.what == "collective":
            bagua.barrier()  # the odd one waits here
        elif args.what == "leaves":
            raise SystemExit(0)
        else:
            os._exit(0)
