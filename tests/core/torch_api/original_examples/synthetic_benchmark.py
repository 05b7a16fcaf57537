"""In the style of the original's synthetic benchmark: fixed random data, timed by timeit, one forward for each step.

Writes <out>/<rank>: a digest of the parameters.
"""

import argparse
import hashlib
import timeit
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import bagua_core.torch_api as bagua

parser = argparse.ArgumentParser()
parser.add_argument("--out", type=Path, required=True)
parser.add_argument("--algorithm", default="gradient_allreduce")
args = parser.parse_args()

bagua.init_process_group()
torch.manual_seed(bagua.get_rank())
model = nn.Sequential(
    nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 14 * 14, 10)
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01 * bagua.get_world_size())
algorithm = bagua.algorithms.Algorithm.init(args.algorithm)
model = model.with_bagua([optimizer], algorithm)
data = torch.randn(8, 3, 16, 16)
target = torch.LongTensor(8).random_() % 10


def benchmark_step():
    optimizer.zero_grad()
    loss = F.cross_entropy(model(data), target)
    loss.backward()
    optimizer.step()


timeit.timeit(benchmark_step, number=2)
images = 0.0
for _ in range(2):
    elapsed_s = timeit.timeit(benchmark_step, number=5)
    images = 8 * 5 / elapsed_s
assert images > 0
if bagua.get_rank() == 0:
    print(f"{images * bagua.get_world_size():.1f} images/s on {bagua.get_world_size()} workers")
parameters = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
(args.out / str(bagua.get_rank())).write_text(hashlib.sha256(parameters).hexdigest())
