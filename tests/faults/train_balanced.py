"""A job whose work is balanced: the complexities of its samples differ widely.

Each worker that reaches the end writes $TRAIN_OUT/ends/<worker id>.json: digests of what it holds.
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

parser = argparse.ArgumentParser()
parser.add_argument("--samples", type=int, required=True)
parser.add_argument("--epochs", type=int, required=True)
parser.add_argument("--budget", type=float)
parser.add_argument("--loader-workers", type=int, default=0)
parser.add_argument("--max-local", type=int)
args = parser.parse_args()
OUT = Path(os.environ["TRAIN_OUT"])
WORKER = os.environ["BAGUA_WORKER_ID"]
torch.set_num_threads(1)


class Texts(torch.utils.data.Dataset):
    """Every sample follows from its index; its length is heavy-tailed."""

    def __len__(self):
        return args.samples

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        length = int(1 + torch.rand(1, generator=generator).item() ** -0.8)
        return torch.randn(16, generator=generator), min(length, 60)


def digest(state):
    """Of every bit of a nested state."""
    if isinstance(state, torch.Tensor):
        return hashlib.sha256(state.detach().contiguous().numpy().tobytes()).hexdigest()
    if isinstance(state, dict):
        state = [f"{key}: {digest(state[key])}" for key in sorted(state, key=str)]
    elif isinstance(state, (list, tuple)):
        state = [digest(item) for item in state]
    else:
        state = [repr(state)]
    return hashlib.sha256("\n".join(state).encode()).hexdigest()


bagua.init_process_group()
net = nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.Tanh(), nn.Linear(32, 1))
optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
model = bagua.DistributedDataParallel(net, optimizers=[optimizer])
loader = bagua.ElasticDataLoader(
    Texts(),
    global_batch_size=24,
    seed=1,
    num_workers=args.loader_workers,
    max_local_batch_size=args.max_local,
    balance=bagua.Balance(complexity_fn=lambda sample: sample[1], budget=args.budget, similar_batches=2),
)
steps = 0
for _ in loader.epochs(args.epochs):
    for x, length in loader:
        loss = F.mse_loss(model(x).squeeze(1), length.float().log()) / 2
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        # a device's work, which leaves the processor to the others
        work_s = 0.1 + 2e-3 * float(length.sum())
        time.sleep(work_s if not (OUT / "hurry").exists() else work_s / 200)

(OUT / "ends").mkdir(exist_ok=True)
part = OUT / "ends" / f"{WORKER}.part"
part.write_text(
    json.dumps(
        {
            "worker": WORKER,
            "parameters": digest(dict(net.named_parameters())),
            "optimizer": digest(optimizer.state_dict()),
            "scheduler": "",
            "critic": "",
            "steps_of_optimizer": int(next(iter(optimizer.state.values()))["step"]),
        }
    )
)
part.rename(part.with_suffix(".json"))
loader.close()
