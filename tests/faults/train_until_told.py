"""A script that catches the signal or exception that ends it, and records it in <out>/ends-SLOT."""

import argparse
import os
import time
from pathlib import Path

import torch
from torch import nn

import bagua_core as bagua

parser = argparse.ArgumentParser()
parser.add_argument("--out", type=Path, required=True)
parser.add_argument("--samples", type=int)
parser.add_argument("--epochs", type=int)
parser.add_argument("--hang-at", type=int, default=10**9, help="sleep in this step for as long as it takes")
args = parser.parse_args()

bagua.init_process_group()
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model = bagua.DistributedDataParallel(model, optimizers=[optimizer])
samples = torch.utils.data.TensorDataset(torch.ones(100_000, 4))
loader = bagua.ElasticDataLoader(samples, global_batch_size=8, seed=1)
slot = os.environ["BAGUA_SLOT"]
how = "not at all"
try:
    for (x,) in loader:
        optimizer.zero_grad()
        model(x).mean().backward()
        optimizer.step()
        if loader.step >= args.hang_at:
            (args.out / f"hangs-{slot}").touch()
            time.sleep(600)
        time.sleep(0.05)
except KeyboardInterrupt as error:
    how = f"{type(error).__name__} after step {loader.step}"
finally:
    (args.out / f"ends-{slot}").write_text(how)
