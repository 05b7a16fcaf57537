"""In the style of the original's MNIST example: barrier around the download, sampler, any algorithm, fused optimizer.

Writes <out>/<rank>: a digest of the parameters.
"""

import argparse
import hashlib
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import bagua_core.torch_api as bagua
from bagua_core.torch_api.algorithms import (
    async_model_average,
    bytegrad,
    decentralized,
    gradient_allreduce,
    q_adam,
)

parser = argparse.ArgumentParser()
parser.add_argument("--out", type=Path, required=True)
parser.add_argument("--algorithm", default="gradient_allreduce")
parser.add_argument("--fuse-optimizer", action="store_true")
args = parser.parse_args()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3)
        self.dropout = nn.Dropout(0.25)
        self.fc = nn.Linear(4 * 13 * 13, 10)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.conv(x)), 2)
        return F.log_softmax(self.fc(torch.flatten(self.dropout(x), 1)), dim=1)


def digits(count):
    generator = torch.Generator().manual_seed(count)
    target = torch.randint(10, (count,), generator=generator)
    images = torch.randn(count, 1, 28, 28, generator=generator)
    images[torch.arange(count), 0, target] += 3.0
    return TensorDataset(images, target)


torch.manual_seed(666 + bagua.get_rank())
bagua.init_process_group()
download = args.out / "downloaded"
if bagua.get_local_rank() == 0:
    download.touch()
    torch.distributed.barrier()
else:
    torch.distributed.barrier()
    assert download.exists()
train_set, test_set = digits(512), digits(128)
sampler = DistributedSampler(train_set, num_replicas=bagua.get_world_size(), rank=bagua.get_rank())
train_loader = DataLoader(train_set, batch_size=64 // bagua.get_world_size(), sampler=sampler, num_workers=1)
test_loader = DataLoader(test_set, batch_size=64)

model = Net()
optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)
if args.fuse_optimizer:
    optimizer = bagua.contrib.fuse_optimizer(optimizer)
if args.algorithm == "gradient_allreduce":
    algorithm = gradient_allreduce.GradientAllReduceAlgorithm()
elif args.algorithm == "decentralized":
    algorithm = decentralized.DecentralizedAlgorithm()
elif args.algorithm == "low_precision_decentralized":
    algorithm = decentralized.LowPrecisionDecentralizedAlgorithm()
elif args.algorithm == "bytegrad":
    algorithm = bytegrad.ByteGradAlgorithm()
elif args.algorithm == "qadam":
    optimizer = q_adam.QAdamOptimizer(model.parameters(), lr=1e-3, warmup_steps=10)
    algorithm = q_adam.QAdamAlgorithm(optimizer)
elif args.algorithm == "async":
    algorithm = async_model_average.AsyncModelAverageAlgorithm(sync_interval_ms=10)
else:
    raise NotImplementedError
model = model.with_bagua([optimizer], algorithm, do_flatten=not args.fuse_optimizer)

scheduler = StepLR(optimizer, step_size=1, gamma=0.7)
for _epoch in range(3):
    model.train()
    for data, target in train_loader:
        optimizer.zero_grad()
        loss = F.nll_loss(model(data), target)
        loss.backward()
        if args.fuse_optimizer:
            optimizer.fuse_step()
        else:
            optimizer.step()
    model.eval()
    correct = 0
    with torch.no_grad():
        for data, target in test_loader:
            correct += int((model(data).argmax(dim=1) == target).sum())
    scheduler.step()
if args.algorithm == "async":
    model.bagua_algorithm.abort(model)
assert correct > 0.5 * len(test_set), correct
parameters = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
(args.out / str(bagua.get_rank())).write_text(hashlib.sha256(parameters).hexdigest())
