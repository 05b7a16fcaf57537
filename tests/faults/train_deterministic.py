"""The script of deterministic jobs: a model with dropout and BatchNorm, the digits, or the characters.

Each worker that reaches the end writes <out>/ends/<worker id>.json: a digest of all that it holds. It seeds nothing.
"""

import argparse
import hashlib
import json
import os
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import bagua_core as bagua
from tests.lab import pace

parser = argparse.ArgumentParser()
parser.add_argument("--out", type=Path, required=True)
parser.add_argument("--samples", type=int, required=True)
parser.add_argument("--epochs", type=int, required=True)
parser.add_argument("--batch", type=int, default=24)
parser.add_argument("--model", default="norm", choices=("norm", "digits", "characters"))
args = parser.parse_args()
WORKER = os.environ["BAGUA_WORKER_ID"]


def norm():
    """The buckets are exchanged in chunks among three workers, or whole if they are small."""
    net = nn.Sequential(
        nn.Linear(16, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.3), nn.Linear(64, 1024)
    )
    net = nn.Sequential(net, nn.BatchNorm1d(1024), nn.Dropout(0.3), nn.Linear(1024, 4))
    x = torch.randn(args.samples, 16, generator=torch.Generator().manual_seed(1))
    return net, x, (x.sum(1) > 0).long() + 2 * (x[:, 0] > 0).long()


def digits():
    from benchmarks.fidelity_tasks import TASKS

    train, _ = TASKS["digits"].pieces()
    return TASKS["digits"].build(), *(tensor[: args.samples] for tensor in train.tensors)


def characters():
    from benchmarks.fidelity_tasks import char_lm

    example = char_lm()
    text = example.read_text(args.samples * example.CONTEXT + 1)
    windows = example.Windows(text)
    pairs = [windows[index] for index in range(args.samples)]
    return example.CharacterModel(width=48, layers=1), *(torch.stack(column) for column in zip(*pairs))  # noqa: B905


bagua.init_process_group()
net, x, y = {"norm": norm, "digits": digits, "characters": characters}[args.model]()
optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
model = bagua.DistributedDataParallel(net, optimizers=[optimizer], bucket_cap_mb=0.1)
loader = bagua.ElasticDataLoader(torch.utils.data.TensorDataset(x, y), args.batch, seed=5)
steps = loader.total_steps(args.epochs)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
bagua.register_state("scheduler", scheduler)
began_s = time.monotonic()
for _ in loader.epochs(args.epochs):
    for inputs, targets in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(inputs).flatten(0, -2), targets.flatten()).backward()
        optimizer.step()
        scheduler.step()
        pace.wait(args.out, began_s + pace.least_s(loader.step, steps))
        began_s = time.monotonic()

digest = hashlib.sha256()
states = [optimizer.state[p] for p in net.parameters()]
for tensor in (*net.state_dict().values(), *(t for state in states for t in state.values())):
    digest.update(bytes(tensor.detach().reshape(-1).view(torch.uint8).tolist()))
digest.update(repr(optimizer.param_groups[0]["lr"]).encode())
(args.out / "ends").mkdir(exist_ok=True)
end = {"worker": WORKER, "parameters": digest.hexdigest(), "shards": os.environ["BAGUA_VIRTUAL_SHARDS"]}
(args.out / "ends" / f"{WORKER.replace('/', '_')}.json").write_text(json.dumps(end))
