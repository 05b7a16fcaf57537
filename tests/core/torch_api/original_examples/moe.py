"""In the style of the original's mixture-of-experts example: an MoE layer, a checkpoint saved and loaded.

Writes <out>/<rank>: number of experts, a digest of the parameters.
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
from bagua_core.torch_api.algorithms import gradient_allreduce

parser = argparse.ArgumentParser()
parser.add_argument("--out", type=Path, required=True)
parser.add_argument("--num-local-experts", type=int, default=0)
args = parser.parse_args()


class Net(nn.Module):
    def __init__(self, num_local_experts):
        super().__init__()
        self.num_local_experts = num_local_experts
        self.fc1 = nn.Linear(16, 16)
        if num_local_experts:
            self.fc2 = bagua.moe.MoE(16, nn.Linear(16, 16), num_local_experts, 2)
            self.fc3 = nn.Linear(16, 4)
        else:
            self.fc2 = nn.Linear(16, 4)

    def forward(self, x):
        x = F.relu(self.fc1(x))
        if self.num_local_experts:
            x, _, _ = self.fc2(x)
            x = self.fc3(x)
        else:
            x = self.fc2(x)
        return F.log_softmax(x, dim=1)


bagua.init_process_group()
if bagua.get_local_rank() == 0:
    torch.distributed.barrier()
else:
    torch.distributed.barrier()
generator = torch.Generator().manual_seed(0)
points = torch.randn(256, 16, generator=generator)
data_set = TensorDataset(points, points[:, :4].argmax(1))
sampler = DistributedSampler(data_set, num_replicas=bagua.get_world_size(), rank=bagua.get_rank())
loader = DataLoader(data_set, batch_size=32 // bagua.get_world_size(), sampler=sampler)
torch.manual_seed(bagua.get_rank())
model = Net(args.num_local_experts)
optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)
model = model.with_bagua([optimizer], gradient_allreduce.GradientAllReduceAlgorithm())
scheduler = StepLR(optimizer, step_size=1, gamma=0.9)
for _epoch in range(8):
    model.train()
    for data, target in loader:
        optimizer.zero_grad()
        F.nll_loss(model(data), target).backward()
        optimizer.step()
    scheduler.step()
model.eval()
with torch.no_grad():
    before = model(points)
assert int((before.argmax(1) == data_set.tensors[1]).sum()) > 150

checkpoints = str(args.out / "checkpoints")
bagua.checkpoint.save_checkpoint(1000, checkpoints, model, optimizer, scheduler)
with torch.no_grad():
    for parameter in model.parameters():
        parameter.zero_()
assert bagua.checkpoint.load_checkpoint(checkpoints, model, optimizer, scheduler) == 1000
with torch.no_grad():
    assert torch.equal(model(points), before)
experts = model.fc2.num_experts if args.num_local_experts else 0
parameters = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
(args.out / str(bagua.get_rank())).write_text(f"{experts} {hashlib.sha256(parameters).hexdigest()}")
