"""In the style of the original's ImageNet example: DistributedSampler without arguments, a disabled GradScaler, a
learning rate set in every iteration.

Writes <out>/<rank>: samples seen, a digest of the parameters.
"""

import argparse
import hashlib
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import bagua_core.torch_api as bagua
from bagua_core.torch_api.algorithms import gradient_allreduce

parser = argparse.ArgumentParser()
parser.add_argument("--out", type=Path, required=True)
args = parser.parse_args()

bagua.init_process_group()
distributed = bagua.get_world_size() > 1
model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 6 * 6, 5))
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=1e-4)
scaler = torch.amp.GradScaler("cpu", enabled=False)
if distributed:
    model = model.with_bagua([optimizer], gradient_allreduce.GradientAllReduceAlgorithm())

generator = torch.Generator().manual_seed(0)
data_set = TensorDataset(torch.randn(120, 3, 8, 8, generator=generator), torch.arange(120) % 5)
sampler = DistributedSampler(data_set) if distributed else None
loader = DataLoader(data_set, batch_size=10, shuffle=sampler is None, sampler=sampler)
seen = []
for epoch in range(2):
    if distributed:
        sampler.set_epoch(epoch)
        seen += list(sampler)
    model.train()
    for i, (images, target) in enumerate(loader):
        for group in optimizer.param_groups:
            group["lr"] = 0.1 * 0.2**epoch * min(1.0, (i + 1) / 3)
        optimizer.zero_grad()
        with torch.autocast("cpu", enabled=False):
            loss = criterion(model(images), target)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    model.eval()
    with torch.no_grad():
        for images, _target in DataLoader(data_set, batch_size=60):
            model(images)
parameters = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
digest = hashlib.sha256(parameters).hexdigest()
(args.out / str(bagua.get_rank())).write_text(f"{','.join(map(str, seen))} {digest}")
