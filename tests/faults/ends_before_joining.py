"""Trains a little; if ENDS_EARLY names a file, makes it and ends with 0 before init_process_group() instead.

It ends once there is no <file>.hold.
"""

import os
import time
from pathlib import Path

import torch

import bagua_core as bagua

if "ENDS_EARLY" in os.environ:
    ended = Path(os.environ["ENDS_EARLY"])
    ended.touch()
    while ended.with_suffix(".hold").exists():
        time.sleep(0.01)
    raise SystemExit(0)
torch.set_num_threads(1)
bagua.init_process_group(seed=0)
module = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
model = bagua.DistributedDataParallel(module, [optimizer])
samples = torch.utils.data.TensorDataset(torch.ones(24, 4))
for (x,) in bagua.ElasticDataLoader(samples, global_batch_size=4, seed=0):
    optimizer.zero_grad()
    model(x).mean().backward()
    optimizer.step()
