"""SyncBatchNorm by itself, as the original's test uses it: no model is wrapped and no step is under way.

Compares output, statistics and gradients with torch's BatchNorm over both workers' samples.
"""

import sys
from pathlib import Path

import torch
from torch import nn

import bagua_core.torch_api as bagua
from bagua_core.torch_api.contrib.sync_batchnorm import SyncBatchNorm

bagua.init_process_group()
rank = bagua.get_rank()


def samples(of_rank):
    generator = torch.Generator().manual_seed(of_rank)
    return torch.randn(8 + of_rank, 3, 4, 4, generator=generator) * (of_rank + 1) + of_rank


whole = torch.cat([samples(0), samples(1)]).requires_grad_()
reference = nn.BatchNorm2d(3)
expected = reference(whole)
(expected + 1.0).square().sum().backward()
own = slice(0, 8) if rank == 0 else slice(8, None)

layer = SyncBatchNorm(3)
x = samples(rank).requires_grad_()
y = layer(x)
(y + 1.0).square().sum().backward()
torch.testing.assert_close(y, expected[own])
torch.testing.assert_close(x.grad, whole.grad[own])
for name in ("running_mean", "running_var", "num_batches_tracked"):
    torch.testing.assert_close(getattr(layer, name), getattr(reference, name))
for name in ("weight", "bias"):  # of each worker's own samples, as in torch's SyncBatchNorm
    total = getattr(layer, name).grad.clone()
    bagua.allreduce_inplace(total)
    torch.testing.assert_close(total, getattr(reference, name).grad)

# statistics computed anew, without training
with torch.no_grad():
    torch.testing.assert_close(layer(samples(rank)), reference(whole)[own])
for name in ("running_mean", "running_var", "num_batches_tracked"):
    torch.testing.assert_close(getattr(layer, name), getattr(reference, name))

layer.eval()
reference.eval()
if rank == 0:  # evaluation asks no other worker
    torch.testing.assert_close(layer(x), reference(x))
(Path(sys.argv[1]) / str(rank)).touch()
