"""The script of benchmarks.submit_start: a few steps, so that a job is over soon after its first."""

import torch

import bagua_core as bagua

model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
wrapped = bagua.DistributedDataParallel(model, [optimizer])
data = torch.utils.data.TensorDataset(torch.randn(8, 4))
for (rows,) in bagua.ElasticDataLoader(data, global_batch_size=4):
    optimizer.zero_grad()
    wrapped(rows).mean().backward()
    optimizer.step()
