"""The job test's script: what fault_job's train.py does, with a fused optimizer. Written as a user would.

Each worker that reaches the end writes <out>/ends/<worker id>.json: digests of what it holds, and how it was fused.
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
from bagua_core.fused_optimizer import fuse

parser = argparse.ArgumentParser()
parser.add_argument("--out", type=Path, required=True)
parser.add_argument("--samples", type=int, required=True)
parser.add_argument("--epochs", type=int, required=True)
parser.add_argument("--fuse-first", action="store_true", help="before the model is wrapped, or else after it")
args = parser.parse_args()
torch.set_num_threads(1)


class Samples(torch.utils.data.Dataset):
    def __len__(self):
        return args.samples

    def __getitem__(self, index):
        x = torch.randn(16, generator=torch.Generator().manual_seed(index))
        return x, int(x.sum() > 0)


def digest(state):
    """Of every bit of a nested state."""
    if isinstance(state, torch.Tensor):
        return hashlib.sha256(state.detach().contiguous().numpy().tobytes()).hexdigest()
    if isinstance(state, dict):
        return digest([(str(key), digest(state[key])) for key in sorted(state, key=str)])
    if isinstance(state, (list, tuple)):
        return hashlib.sha256(repr([digest(item) for item in state]).encode()).hexdigest()
    return repr(state)


bagua.init_process_group()
torch.manual_seed(os.getpid())  # on purpose another on each worker: the job's beginning is rank 0's
net = nn.Sequential(
    nn.Linear(16, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 2)
)
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
if args.fuse_first:
    optimizer = bagua.fuse_optimizer(optimizer)
model = bagua.DistributedDataParallel(net, optimizers=[optimizer])
if not args.fuse_first:
    optimizer = bagua.fuse_optimizer(optimizer)
loader = bagua.ElasticDataLoader(Samples(), global_batch_size=24, seed=1)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs * len(loader))
bagua.register_state("scheduler", scheduler)

for _epoch in loader.epochs(args.epochs):
    for x, y in loader:
        began_s = time.monotonic()
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.fuse_step()
        scheduler.step()
        while not (args.out / "hurry").exists() and time.monotonic() < began_s + 0.04:
            time.sleep(0.01)  # a step's least duration, so that the test has time to look

(block,) = fuse._fused[optimizer][0].layout.blocks
gradients = [p.grad for p in block.members]
end = {
    "worker": os.environ["BAGUA_WORKER_ID"],
    "parameters": digest(dict(net.named_parameters())),
    "optimizer": digest(optimizer.state_dict()),
    "scheduler": digest(scheduler.state_dict()),
    "critic": "",
    "steps_of_scheduler": scheduler.last_epoch,
    "steps_of_optimizer": int(next(iter(optimizer.state.values()))["step"]),
    "batches_of_batch_norm": int(net[1].num_batches_tracked),
    "members": len(block.members),
    "gradients_copied": block.copied,
    "in_one_bucket": len({g.untyped_storage().data_ptr() for g in gradients}) == 1,
}
(args.out / "ends").mkdir(exist_ok=True)
part = args.out / "ends" / f"{end['worker']}.part"
part.write_text(json.dumps(end))
part.rename(part.with_suffix(".json"))
loader.close()
