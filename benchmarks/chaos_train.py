"""The script of the chaos job: trains a classifier of the two arms of a spiral until a file says stop.

All workers read the file between two epochs and agree by a collective, so that all end at the same place. Each worker
that reaches the end writes <out>/ends/<worker id>.json: its loss on unseen samples, and digests of its state. Written
as a user would, without a __main__ guard.
"""

import argparse
import hashlib
import json
import math
import os
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import bagua_core as bagua

parser = argparse.ArgumentParser()
parser.add_argument("--out", type=Path, required=True, help="holds `stop` at the end, and gets ends/")
parser.add_argument("--samples", type=int, default=2400, help="of an epoch")
parser.add_argument("--batch", type=int, default=48, help="of all workers together")
parser.add_argument("--step-s", type=float, default=0.03, help="least duration of a step, until `stop`")
parser.add_argument("--least-steps", type=int, default=1200, help="go on for so long after `stop`")
args = parser.parse_args()

MOST_EPOCHS = 1_000_000
torch.set_num_threads(1)


def spiral(samples, seed):
    generator = torch.Generator().manual_seed(seed)
    radius = torch.rand(samples, generator=generator)
    arm = torch.randint(0, 2, (samples,), generator=generator)
    angle = 6.0 * radius + math.pi * arm
    points = torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1)
    return TensorDataset(points + 0.02 * torch.randn(samples, 2, generator=generator), arm)


def digest(state):
    """Of every bit of a nested state."""
    if isinstance(state, torch.Tensor):
        return hashlib.sha256(state.detach().contiguous().numpy().tobytes()).hexdigest()
    if isinstance(state, dict):
        parts = [f"{key}: {digest(state[key])}" for key in sorted(state, key=str)]
    elif isinstance(state, (list, tuple)):
        parts = [digest(item) for item in state]
    else:
        parts = [repr(state)]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def learning_rate(step):
    return min(1.0, (1500 / (1 + step)) ** 0.5)


bagua.init_process_group()
torch.manual_seed(os.getpid())  # on purpose another on each worker: the job's beginning is rank 0's
net = nn.Sequential(
    nn.Linear(2, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2)
)
optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
model = bagua.DistributedDataParallel(net, optimizers=[optimizer])
loader = bagua.ElasticDataLoader(spiral(args.samples, 0), global_batch_size=args.batch, seed=1)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, learning_rate)
bagua.register_state("scheduler", scheduler)

epochs = 0
for epoch in loader.epochs(MOST_EPOCHS):
    began_s = time.monotonic()
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        scheduler.step()
        if not (args.out / "stop").exists():
            time.sleep(max(0.0, began_s + args.step_s - time.monotonic()))  # stands for a device's work
        began_s = time.monotonic()
    is_asked = (args.out / "stop").exists() and scheduler.last_epoch >= args.least_steps
    epochs = epoch + 1
    if bagua.allreduce(torch.tensor([float(is_asked)])).item() > 0:
        break

model.eval()
with torch.no_grad():
    points, arms = spiral(1000, 1).tensors
    loss = F.cross_entropy(net(points), arms).item()
worker = os.environ.get("BAGUA_WORKER_ID", "none")
end = {
    "worker": worker,
    "epochs": epochs,
    "steps": scheduler.last_epoch,
    "loss": loss,
    "digests": {
        # not the buffers: each worker's running statistics are of its own samples
        "parameters": digest(dict(net.named_parameters())),
        "optimizer": digest(optimizer.state_dict()),
        "scheduler": digest(scheduler.state_dict()),
    },
}
(args.out / "ends").mkdir(exist_ok=True)
part = args.out / "ends" / f"{worker}.part"
part.write_text(json.dumps(end))
part.rename(part.with_suffix(".json"))
loader.close()
