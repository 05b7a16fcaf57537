"""The script of benchmarks.scale_effect: steps of about 20 ms until its job is stopped."""

import time

import torch

import bagua_core as bagua

model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
wrapped = bagua.DistributedDataParallel(model, [optimizer])
data = torch.utils.data.TensorDataset(torch.randn(400_000, 4))
for (rows,) in bagua.ElasticDataLoader(data, global_batch_size=4):
    optimizer.zero_grad()
    wrapped(rows).mean().backward()
    optimizer.step()
    time.sleep(0.02)
