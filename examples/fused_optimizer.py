"""An optimizer that torch has no fused step for. Watch the last lines: its time alone and fused, and the same bits.

    python examples/fused_optimizer.py                          # one process
    bagua-launch --nproc-per-node 2 examples/fused_optimizer.py  # two, elastic

It steps blocks of parameters instead of each. At the end both ways train equal models, which stay equal.
"""

import argparse
import time

import torch
import torch.nn.functional as F
from torch import nn

import bagua_core as bagua

parser = argparse.ArgumentParser()
parser.add_argument("--layers", type=int, default=20)
parser.add_argument("--epochs", type=int, default=4)
args = parser.parse_args()
torch.set_num_threads(1)


def network():
    torch.manual_seed(0)
    layers = [nn.Linear(2, 32)]
    for _ in range(args.layers):
        layers += [nn.LayerNorm(32), nn.ReLU(), nn.Linear(32, 32)]
    return nn.Sequential(*layers, nn.Linear(32, 2))


def spirals(samples):
    generator = torch.Generator().manual_seed(0)
    radius = torch.rand(samples, generator=generator)
    arm = torch.randint(0, 2, (samples,), generator=generator)
    angle = 6.0 * radius + torch.pi * arm
    return torch.utils.data.TensorDataset(torch.stack([radius * angle.cos(), radius * angle.sin()], 1), arm)


bagua.init_process_group()
net = network()
optimizer = bagua.fuse_optimizer(torch.optim.RAdam(net.parameters(), lr=3e-3))
model = bagua.DistributedDataParallel(net, optimizers=[optimizer])
loader = bagua.ElasticDataLoader(spirals(1200), global_batch_size=48, seed=0)

for epoch in loader.epochs(args.epochs):
    for x, y in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
    bagua.report(loss=loss.item())
    print(f"epoch {epoch}: loss {loss.item():.3f}", flush=True)

if bagua.get_rank() == 0:
    plain, fused = network(), network()
    steps = {
        "alone": (plain, torch.optim.RAdam(plain.parameters(), lr=1e-3)),
        "fused": (fused, bagua.fuse_optimizer(torch.optim.RAdam(fused.parameters(), lr=1e-3))),
    }
    x, y = spirals(48)[:]
    took_s = {name: [] for name in steps}
    for _ in range(20):
        for name, (net, optimizer) in steps.items():
            F.cross_entropy(net(x), y).backward()
            begun_s = time.perf_counter()
            optimizer.step()
            took_s[name].append(time.perf_counter() - begun_s)
            optimizer.zero_grad()
    for name, seconds in took_s.items():
        print(f"{name}: {1000 * sorted(seconds)[len(seconds) // 2]:.2f} ms a step")
    same = all(map(torch.equal, plain.parameters(), fused.parameters()))
    print(f"same bits: {same}")
loader.close()
