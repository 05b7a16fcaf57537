"""One worker of benchmarks.steps: the same model under Bagua's plain allreduce and under DDP, in turn.

Both live in one process and take turns block by block, so that both see the same machine. Rank 0 writes the
times of whole loop iterations, without each block's first ones.
"""

import argparse
import json
import os
import time
from datetime import timedelta
from pathlib import Path

import both_in_one_process  # noqa: F401 - before anything opens a session
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from workload import CLASSES, mlp

import bagua_core as bagua

parser = argparse.ArgumentParser()
parser.add_argument("--out", type=Path, required=True)
parser.add_argument("--store", required=True, help="HOST:PORT of torch's store; served by the worker on HOST")
parser.add_argument("--width", type=int, required=True)
parser.add_argument("--batch", type=int, default=16)
parser.add_argument("--steps", type=int, required=True, help="in a block")
parser.add_argument("--blocks", type=int, required=True, help="of each system")
args = parser.parse_args()
WARM_UP = 3

bagua.init_process_group()
net = mlp(args.width)
optimizer = torch.optim.SGD(net.parameters(), lr=0.001)
model = bagua.DistributedDataParallel(net, optimizers=[optimizer])
x, y = torch.randn(args.batch, args.width), torch.randint(CLASSES, (args.batch,))


def ddp() -> tuple[DistributedDataParallel, torch.optim.Optimizer]:
    host, port = args.store.rsplit(":", 1)
    serves = os.environ["BAGUA_BIND_HOST"] == host
    limit = timedelta(seconds=60)
    store = dist.TCPStore(host, int(port), is_master=serves, wait_for_workers=False, timeout=limit)
    rank, world_size = bagua.get_rank(), bagua.get_world_size()
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=limit)
    other = mlp(args.width)
    return DistributedDataParallel(other), torch.optim.SGD(other.parameters(), lr=0.001)


def block_of_ddp(rival: DistributedDataParallel, its_optimizer: torch.optim.Optimizer) -> list[float]:
    times = []
    for _ in range(WARM_UP + args.steps):
        began_s = time.perf_counter()
        its_optimizer.zero_grad()
        F.cross_entropy(rival(x), y).backward()
        its_optimizer.step()
        times.append(time.perf_counter() - began_s)
    return times[WARM_UP:]


its = None
theirs: list[list[float]] = []
ours: list[list[float]] = []
block: list[float] = []
began_s = 0.0
while bagua.next_step() >= 0:
    now_s = time.perf_counter()
    if its is None:
        its = ddp()
    elif began_s:
        block.append(now_s - began_s)
    began_s = time.perf_counter()
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    if len(block) == WARM_UP + args.steps:
        ours.append(block[WARM_UP:])
        block = []
        theirs.append(block_of_ddp(*its))
        began_s = 0.0
        if len(theirs) == args.blocks:
            break
if bagua.get_rank() == 0:
    parameters = sum(p.numel() for p in net.parameters())
    result = {
        "parameters": parameters,
        "world_size": bagua.get_world_size(),
        "bagua_s": ours,
        "ddp_s": theirs,
    }
    args.out.write_text(json.dumps(result))
