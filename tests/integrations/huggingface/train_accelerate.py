"""The tests' script: a loop of accelerate's with a scheduler and groups of batches, steps as long as the test asks.

Each worker that reaches the end writes <out>/ends/<worker id>.json: digests and counters of what it holds.
"""

import argparse
import hashlib
import json
import os
import signal
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

import bagua_core as bagua
from bagua_core.integrations.huggingface import ElasticAccelerator
from tests.lab import pace

parser = argparse.ArgumentParser()
parser.add_argument("--out", type=Path, required=True)
parser.add_argument("--samples", type=int, required=True)
parser.add_argument("--epochs", type=int, required=True)
parser.add_argument("--accumulate", type=int, default=1)
parser.add_argument("--algorithm", default="gradient_allreduce")
parser.add_argument(
    "--dies-in-gather", action="store_true", help="rank 1, in an evaluation, between two collectives"
)
args = parser.parse_args()

torch.set_num_threads(1)
WORKER = os.environ.get("BAGUA_WORKER_ID", "none")


def samples(count):
    x = torch.randn(count, 16, generator=torch.Generator().manual_seed(1))
    return TensorDataset(x, (x.sum(1) > 0).long())


def digest(state):
    """Of every bit of a flat or nested state."""
    if isinstance(state, torch.Tensor):
        return hashlib.sha256(state.detach().contiguous().numpy().tobytes()).hexdigest()
    if isinstance(state, dict):
        parts = [f"{key}: {digest(state[key])}" for key in sorted(state, key=str)]
    elif isinstance(state, (list, tuple)):
        parts = [digest(item) for item in state]
    else:
        parts = [repr(state)]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def gathered(y):
    if args.dies_in_gather and accelerator.process_index == 1 and not (args.out / "has-died").exists():
        (args.out / "has-died").touch()
        bagua.allgather(torch.tensor(y.shape))  # the first one that a gather of unequal sizes takes
        os.kill(os.getpid(), signal.SIGKILL)
    return accelerator.gather_for_metrics(y)


accelerator = ElasticAccelerator(
    args.algorithm, cpu=True, mixed_precision="bf16", gradient_accumulation_steps=args.accumulate
)
torch.manual_seed(os.getpid())  # on purpose another on each worker: the job's beginning is rank 0's
module = torch.nn.Sequential(
    torch.nn.Linear(16, 32), torch.nn.BatchNorm1d(32), torch.nn.ReLU(), torch.nn.Linear(32, 2)
)
torch_optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
torch_scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(torch_optimizer, 1000)
model, optimizer, loader, evaluation, scheduler = accelerator.prepare(
    module,
    torch_optimizer,
    DataLoader(samples(args.samples), batch_size=24, shuffle=True),
    DataLoader(samples(50), batch_size=8),
    torch_scheduler,
)
seen = []
for _ in loader.epochs(args.epochs):
    for x, y in loader:
        began_s = time.monotonic()
        least_s = pace.least_s(loader.step, args.epochs * len(loader))
        with accelerator.accumulate(model):
            accelerator.backward(F.cross_entropy(model(x), y))
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        pace.wait(args.out, began_s + least_s)
    model.eval()
    with torch.no_grad():
        labels = [gathered(y) for _, y in evaluation]
    model.train()
    seen.append(len(torch.cat(labels)))
end = {
    "worker": WORKER,
    "parameters": digest(dict(module.named_parameters())),
    "optimizer": digest(torch_optimizer.state_dict()),
    "scheduler": digest(torch_scheduler.state_dict()),
    "steps_of_scheduler": torch_scheduler.last_epoch,
    "steps_of_optimizer": int(torch_optimizer.state[module[0].weight]["step"]),
    "batches_of_batch_norm": int(module[1].num_batches_tracked),
    "seen": seen,
}
(args.out / "ends").mkdir(exist_ok=True)
part = args.out / "ends" / f"{WORKER}.part"
part.write_text(json.dumps(end))
part.rename(part.with_suffix(".json"))
