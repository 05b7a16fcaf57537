"""In the style of the original's elastic example: barrier with device_ids, resuming from the script's own checkpoint.

Writes <out>/<rank>: epochs trained, a digest of the parameters.
"""

import argparse
import hashlib
import os
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import bagua_core.torch_api as bagua
from bagua_core.torch_api.algorithms import gradient_allreduce

parser = argparse.ArgumentParser()
parser.add_argument("--out", type=Path, required=True)
parser.add_argument("--epochs", type=int, default=2)
args = parser.parse_args()
checkpoint_path = args.out / "model.ckpt"

torch.manual_seed(1)
bagua.init_process_group()
torch.distributed.barrier(device_ids=[bagua.get_local_rank()])
data_set = TensorDataset(torch.randn(256, 8), torch.randint(2, (256,)))
sampler = DistributedSampler(data_set, num_replicas=bagua.get_world_size(), rank=bagua.get_rank())
loader = DataLoader(data_set, batch_size=32 // bagua.get_world_size(), sampler=sampler)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)

start_epoch = 1
if os.path.exists(checkpoint_path):
    checkpoint = torch.load(checkpoint_path)
    model.load_state_dict(checkpoint["model_state_dict"])
    optimizer.load_state_dict(checkpoint["optimizer_state_dict"])
    start_epoch = checkpoint["epoch"]
torch.distributed.barrier()
model = model.with_bagua([optimizer], gradient_allreduce.GradientAllReduceAlgorithm())

scheduler = StepLR(optimizer, step_size=1, gamma=0.7)
trained = 0
for epoch in range(start_epoch, args.epochs + 1):
    model.train()
    for data, target in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(data), target).backward()
        optimizer.step()
    trained += 1
    scheduler.step()
    if bagua.get_rank() == 0:
        state = {"model_state_dict": model.state_dict(), "optimizer_state_dict": optimizer.state_dict()}
        torch.save({"epoch": epoch + 1, **state}, checkpoint_path)
parameters = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
digest = hashlib.sha256(parameters).hexdigest()
(args.out / str(bagua.get_rank())).write_text(f"{trained} {digest}")
