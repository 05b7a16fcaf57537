"""The workload under torchrun, as its tutorials do it: DDP, and a checkpoint that a restart begins from."""

import argparse
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Subset
from workload import Samples, StepLog, device_time, mlp

parser = argparse.ArgumentParser()
parser.add_argument("--steps", required=True, help="directory of the step log")
parser.add_argument("--checkpoint", type=Path, required=True)
parser.add_argument("--checkpoint-every", type=int, default=50)
parser.add_argument("--global-batch", type=int, default=48)
args = parser.parse_args()

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
log = StepLog(args.steps, f"{os.uname().nodename}")
# TORCHELASTIC_RESTART_COUNT differs between agents, so rank 0's clock tells one incarnation from the next
incarnation = torch.tensor([time.time_ns() // 1_000_000])
dist.broadcast(incarnation, 0)

net = mlp()
optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
step = 0
if args.checkpoint.exists():
    saved = torch.load(args.checkpoint)
    net.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    step = saved["step"]
model = DistributedDataParallel(net)

# The kindest a script can be: a fixed global batch, and the order goes on where the checkpoint was.
dataset = Samples()
order = torch.randperm(len(dataset), generator=torch.Generator().manual_seed(0))
own = order[step * args.global_batch :][rank::world_size]
share = args.global_batch // world_size
loader = DataLoader(Subset(dataset, own.tolist()), batch_size=share)
for x, y, samples in loader:
    optimizer.zero_grad()
    device_time()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    step += 1
    log.committed(step, world_size, samples.tolist(), generation=int(incarnation), rank=rank)
    if rank == 0 and step % args.checkpoint_every == 0:
        state = {"model": net.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
        torch.save(state, args.checkpoint.with_suffix(".new"))
        args.checkpoint.with_suffix(".new").rename(args.checkpoint)
