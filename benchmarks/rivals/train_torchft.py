"""The workload under torchft: one replica group a host.

Gradients are reduced by `manager.allreduce` in one buffer: with Gloo, the hook of torchft 0.2.0's own
DistributedDataParallel raises AssertionError when a peer dies, and the process ends.
"""

import argparse
import logging
import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils.data import DataLoader
from torchft import DistributedSampler, Manager, ProcessGroupGloo
from workload import Samples, StepLog, device_time, mlp

parser = argparse.ArgumentParser()
parser.add_argument("--steps", required=True, help="directory of the step log")
parser.add_argument("--lighthouse", required=True)
parser.add_argument("--address", required=True, help="this host's, as its peers reach it")
parser.add_argument("--replica", type=int, required=True)
parser.add_argument("--replicas", type=int, default=3, help="the most there will be")
parser.add_argument("--global-batch", type=int, default=48, help="with all replicas there")
parser.add_argument("--timeout", type=float, default=5.0)
args = parser.parse_args()

logging.basicConfig(stream=sys.stderr, level=logging.WARNING)
log = StepLog(args.steps, f"{os.uname().nodename}")
store = dist.TCPStore(args.address, 0, is_master=True, wait_for_workers=False)
net = mlp()
optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)


def load(state: dict) -> None:
    net.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])


timeout = timedelta(seconds=args.timeout)
manager = Manager(
    pg=ProcessGroupGloo(timeout=timeout),
    min_replica_size=2,
    load_state_dict=load,
    state_dict=lambda: {"model": net.state_dict(), "optimizer": optimizer.state_dict()},
    replica_id=f"replica_{args.replica}",
    store_addr=args.address,
    store_port=store.port,
    rank=0,
    world_size=1,
    lighthouse_addr=args.lighthouse,
    hostname=args.address,
    timeout=timeout,
)


def reduce_gradients() -> None:
    gradients = [p.grad for p in net.parameters() if p.grad is not None]
    flat = torch.nn.utils.parameters_to_vector(gradients)
    manager.allreduce(flat).wait()
    torch.nn.utils.vector_to_parameters(flat, gradients)


dataset = Samples()
sampler = DistributedSampler(
    dataset, args.replica, args.replicas, group_rank=0, num_replicas=1, shuffle=True, seed=0
)
for x, y, samples in DataLoader(dataset, batch_size=args.global_batch // args.replicas, sampler=sampler):
    # what torchft's optimizer wrapper does, taken apart to see whether the step was committed
    manager.start_quorum()
    optimizer.zero_grad()
    device_time()
    F.cross_entropy(net(x), y).backward()
    reduce_gradients()
    counted, size = manager.is_participating(), manager.num_participants()
    own = samples.tolist()
    if manager.should_commit():
        optimizer.step()
        log.committed(manager.current_step(), size, own if counted else [], rank=args.replica)
        if not counted:  # it was healing: these samples were drawn for nothing
            log.given_up(manager.current_step(), size, own)
    else:
        log.given_up(manager.current_step(), size, own)
