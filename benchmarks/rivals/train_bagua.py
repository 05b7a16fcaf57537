"""The workload under `bagua-launch`; its ledger is the step log."""

import argparse

import torch
import torch.nn.functional as F
from workload import Samples, device_time, mlp

import bagua_core as bagua

parser = argparse.ArgumentParser()
parser.add_argument("--global-batch", type=int, default=48)
args = parser.parse_args()

bagua.init_process_group()
net = mlp()
optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
model = bagua.DistributedDataParallel(net, optimizers=[optimizer])
loader = bagua.ElasticDataLoader(Samples(), global_batch_size=args.global_batch, seed=0)
for _epoch in loader.epochs(1000):
    for x, y, _ in loader:
        optimizer.zero_grad()
        device_time()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
