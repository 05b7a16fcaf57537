"""The worker of benchmarks.steps that measures what the elastic machinery costs a step: tiny steps, alone.

The bare torch loop, torch's DDP over Gloo and Bagua's take turns block by block in one process. --loop loader
compares ElasticDataLoader with torch's DataLoader; --loop next-step uses no loader in any.
"""

import argparse
import json
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import both_in_one_process  # noqa: F401 - before anything opens a session
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import bagua_core as bagua

parser = argparse.ArgumentParser()
parser.add_argument("--out", type=Path, required=True)
parser.add_argument("--loop", choices=["loader", "next-step"], required=True)
parser.add_argument("--steps", type=int, default=500, help="in a block")
parser.add_argument("--blocks", type=int, default=6, help="of each kind")
args = parser.parse_args()
BATCH, WIDTH, WARM_UP = 4, 16, 50

torch.manual_seed(0)
dataset = TensorDataset(torch.randn(1_000_000, WIDTH), torch.randn(1_000_000, 1))
fixed = (torch.randn(BATCH, WIDTH), torch.randn(BATCH, 1))


def small() -> tuple[nn.Module, torch.optim.Optimizer]:
    net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 1))
    return net, torch.optim.SGD(net.parameters(), lr=0.001)


def train(net: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor) -> None:
    optimizer.zero_grad()
    (net(x) - y).square().mean().backward()
    optimizer.step()


bare_net, bare_optimizer = small()
ddp_net, ddp_optimizer = small()
torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
ddp_model = nn.parallel.DistributedDataParallel(ddp_net, gradient_as_bucket_view=True)
# torch's sampler draws a permutation of the whole set first, so one iteration serves all blocks
bare_batches = iter(DataLoader(dataset, batch_size=BATCH, shuffle=True))


def torch_block(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    """Whole iterations of the loop a user would write without Bagua."""
    times = []
    began_s = time.perf_counter()
    for _ in range(WARM_UP + args.steps):
        x, y = next(bare_batches) if args.loop == "loader" else fixed
        train(model, optimizer, x, y)
        now_s = time.perf_counter()
        times.append(now_s - began_s)
        began_s = now_s
    return times[WARM_UP:]


bagua.init_process_group()
net, optimizer = small()
model = bagua.DistributedDataParallel(net, optimizers=[optimizer])


def batches() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    if args.loop == "loader":
        loader = bagua.ElasticDataLoader(dataset, global_batch_size=BATCH, seed=0)
        for _ in loader.epochs(1):
            yield from loader
    else:
        while bagua.next_step() >= 0:
            yield fixed


bare: list[list[float]] = []
ddp: list[list[float]] = []
elastic: list[list[float]] = []
running = batches()
for _ in range(args.blocks):
    times = []
    began_s = time.perf_counter()
    for x, y in islice(running, WARM_UP + args.steps):
        train(model, optimizer, x, y)
        now_s = time.perf_counter()
        times.append(now_s - began_s)
        began_s = now_s
    elastic.append(times[WARM_UP:])
    bare.append(torch_block(bare_net, bare_optimizer))
    ddp.append(torch_block(ddp_model, ddp_optimizer))
args.out.write_text(json.dumps({"bare_s": bare, "ddp_s": ddp, "elastic_s": elastic}))
