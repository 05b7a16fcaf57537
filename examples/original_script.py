"""A script of the original Bagua. Watch for: it trains with nothing but its import changed.

    bagua-launch --nproc-per-node 2 examples/original_script.py --algorithm bytegrad

It marks no steps, counts its own epochs and shards with torch's DistributedSampler; docs/original-scripts.md says what
that means when a worker is lost.
"""

import argparse

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import bagua_core.torch_api as bagua

parser = argparse.ArgumentParser()
parser.add_argument("--algorithm", default="gradient_allreduce")
parser.add_argument("--epochs", type=int, default=5)
parser.add_argument("--batch-size", type=int, default=32, help="of each worker")
parser.add_argument("--lr", type=float, default=0.05)
args = parser.parse_args()


def rings(samples, seed):
    """Points of the plane; the label says in which of three rings a point lies."""
    generator = torch.Generator().manual_seed(seed)
    angle = 2 * torch.pi * torch.rand(samples, generator=generator)
    radius = 3 * torch.rand(samples, generator=generator)
    return TensorDataset(torch.stack([radius * angle.cos(), radius * angle.sin()], 1), radius.long())


def train(model, optimizer, loader):
    model.train()
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()


def accuracy(model, loader):
    """Over all workers' shares of the test set."""
    model.eval()
    right_and_all = torch.zeros(2)
    with torch.no_grad():
        for x, y in loader:
            right_and_all += torch.tensor([(model(x).argmax(1) == y).sum().item(), len(y)])
    bagua.allreduce_inplace(right_and_all)
    return (right_and_all[0] / right_and_all[1]).item()


torch.set_num_threads(1)
torch.manual_seed(1)
bagua.init_process_group()
world = {"num_replicas": bagua.get_world_size(), "rank": bagua.get_rank()}
train_set, test_set = rings(6000, seed=1), rings(1000, seed=2)
train_sampler = DistributedSampler(train_set, **world)
train_loader = DataLoader(train_set, args.batch_size, sampler=train_sampler)
test_loader = DataLoader(test_set, 250, sampler=DistributedSampler(test_set, shuffle=False, **world))

model = nn.Sequential(
    nn.Linear(2, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 3)
)
if args.algorithm == "qadam":
    optimizer = bagua.algorithms.q_adam.QAdamOptimizer(model.parameters(), lr=args.lr / 10, warmup_steps=50)
    algorithm = bagua.algorithms.Algorithm.init("qadam", q_adam_optimizer=optimizer)
else:
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr * bagua.get_world_size(), momentum=0.9)
    algorithm = bagua.algorithms.Algorithm.init(args.algorithm)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
model = model.with_bagua([optimizer], algorithm)

for epoch in range(args.epochs):
    train_sampler.set_epoch(epoch)
    train(model, optimizer, train_loader)
    scheduler.step()
    reached = accuracy(model, test_loader)
    if bagua.get_rank() == 0:
        print(f"epoch {epoch}: accuracy {reached:.3f} on {bagua.get_world_size()} workers", flush=True)
if args.algorithm == "async":
    algorithm.abort(model)
