"""Trains, shuts down twice, and then asks for another training. Prints what it was answered."""

import sys

import torch

import bagua_core as bagua
from bagua_core.errors import TrainingOver

torch.set_num_threads(1)
samples = torch.utils.data.TensorDataset(torch.ones(96, 4))
module = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
model = bagua.DistributedDataParallel(module, [optimizer])
loader = bagua.ElasticDataLoader(samples, global_batch_size=12, seed=0)
for number, (x,) in loader.enumerate():
    optimizer.zero_grad()
    model(x).mean().backward()
    optimizer.step()
    if number == 5:
        break  # the step is under way still
bagua.shutdown()
bagua.shutdown()
print("launched" if bagua.is_launched() else "alone", flush=True)
try:
    bagua.DistributedDataParallel(module, [optimizer])
except TrainingOver as error:
    print(f"refused: {error}", flush=True)
    sys.exit(0)
sys.exit("a second training began")
