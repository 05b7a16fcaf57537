"""A script that calls a collective after the end of its training. Rank 1 never comes to it."""

import argparse
import os
import time
from pathlib import Path

import torch
from torch import nn

import bagua_core as bagua

parser = argparse.ArgumentParser()
parser.add_argument("--out", type=Path, required=True)
parser.add_argument(
    "--uncaught", action="store_true", help="let the first error of the collective end the script"
)
arguments = parser.parse_args()
out = arguments.out

bagua.init_process_group()
net = nn.Linear(4, 1)
optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
model = bagua.DistributedDataParallel(net, optimizers=[optimizer])
loader = bagua.ElasticDataLoader(torch.utils.data.TensorDataset(torch.ones(16, 4)), 8)
for _ in loader.epochs(2):
    for (x,) in loader:
        optimizer.zero_grad()
        model(x).mean().backward()
        optimizer.step()
trained = out / f"trained-{bagua.get_rank()}"
trained.with_suffix(".part").write_text(os.environ["BAGUA_WORKER_ID"])
trained.with_suffix(".part").rename(trained)
while bagua.get_rank() == 1:
    time.sleep(60)
if arguments.uncaught:
    bagua.allreduce(torch.ones(1))
for attempt in range(2):
    try:
        bagua.allreduce(torch.ones(1))
    except bagua.JobClosing as error:
        (out / f"lost-{attempt}").write_text(str(error))
torch.save(net.state_dict(), out / "model.pt")
(out / "saved").touch()
