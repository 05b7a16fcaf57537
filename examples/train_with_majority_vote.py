"""Trains by majority_vote.py. Watch for: the loss falls, though workers send only the signs of their gradients.

bagua-launch --nproc-per-node 3 examples/train_with_majority_vote.py
"""

import torch
import torch.nn.functional as F
from majority_vote import MajorityVote

import bagua_core as bagua

EPOCHS = 4
torch.set_num_threads(1)


def spirals(samples: int) -> torch.utils.data.TensorDataset:
    generator = torch.Generator().manual_seed(0)
    radius = torch.rand(samples, generator=generator)
    arm = torch.randint(0, 2, (samples,), generator=generator)
    angle = 6.0 * radius + torch.pi * arm
    return torch.utils.data.TensorDataset(torch.stack([radius * angle.cos(), radius * angle.sin()], 1), arm)


bagua.init_process_group()
net = torch.nn.Sequential(torch.nn.Linear(2, 64), torch.nn.Tanh(), torch.nn.Linear(64, 64), torch.nn.Tanh())
net.append(torch.nn.Linear(64, 2))
optimizer = torch.optim.SGD(net.parameters(), lr=0.002, momentum=0.9)
model = bagua.DistributedDataParallel(net, optimizers=[optimizer], algorithm=MajorityVote())
loader = bagua.ElasticDataLoader(spirals(6000), global_batch_size=48, seed=0)
scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.05, total_iters=EPOCHS * len(loader))
bagua.register_state("scheduler", scheduler)

for epoch in loader.epochs(EPOCHS):
    losses = []
    for x, y in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())
    mean = bagua.allreduce(torch.tensor(losses[-20:]).mean(), bagua.ReduceOp.AVG).item()
    bagua.report(loss=mean)
    if bagua.get_rank() == 0:
        print(f"epoch {epoch}: loss {mean:.3f}", flush=True)
