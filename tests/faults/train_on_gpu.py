"""A small model on a GPU, for jobs over the real NCCL: each worker counts as a host of its own, so several share a GPU.

Each worker that reaches the end writes <out>/ends/<worker id>.json, as train.py does.
"""

import argparse
import hashlib
import json
import os
import time
from pathlib import Path

WORKER = os.environ["BAGUA_WORKER_ID"]
os.environ["NCCL_HOSTID"] = WORKER  # before NCCL is loaded; ranks of one host need a GPU each

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from torch import nn  # noqa: E402

import bagua_core as bagua  # noqa: E402

parser = argparse.ArgumentParser()
parser.add_argument("--out", type=Path, required=True)
parser.add_argument("--samples", type=int, default=6000)
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument(
    "--step-s", type=float, default=0.05, help="least duration of a step, until there is hurry"
)
parser.add_argument("--algorithm", default="gradient_allreduce")
args = parser.parse_args()


class Samples(torch.utils.data.Dataset):
    """Every sample follows from its index."""

    def __len__(self):
        return args.samples

    def __getitem__(self, index):
        x = torch.randn(16, generator=torch.Generator().manual_seed(index))
        return x, int(x.sum() > 0)


def digest(state):
    """Of every bit of a nested state."""
    if isinstance(state, torch.Tensor):
        return hashlib.sha256(state.detach().cpu().contiguous().numpy().tobytes()).hexdigest()
    if isinstance(state, dict):
        parts = [f"{key}: {digest(state[key])}" for key in sorted(state, key=str)]
    elif isinstance(state, (list, tuple)):
        parts = [digest(item) for item in state]
    else:
        parts = [repr(state)]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


slot = int(os.environ["BAGUA_SLOT"])
device = torch.device("cuda", slot % torch.cuda.device_count())
torch.cuda.set_device(device)
bagua.init_process_group()
torch.manual_seed(os.getpid())  # on purpose another on each worker: the job's beginning is rank 0's
net = nn.Sequential(nn.Linear(16, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 2)).to(
    device
)
optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
algorithm = type(bagua.algorithms.find_algorithm(args.algorithm))()
model = bagua.DistributedDataParallel(net, optimizers=[optimizer], algorithm=algorithm)
loader = bagua.ElasticDataLoader(Samples(), global_batch_size=24, seed=1)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs * len(loader))
bagua.register_state("scheduler", scheduler)

for _ in loader.epochs(args.epochs):
    began_s = time.monotonic()
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(x.to(device)), y.to(device)).backward()
        optimizer.step()
        scheduler.step()
        if not (args.out / "hurry").exists():
            time.sleep(max(0.0, began_s + args.step_s - time.monotonic()))
        began_s = time.monotonic()

end = {
    "worker": WORKER,
    "parameters": digest(dict(net.named_parameters())),
    "optimizer": digest(optimizer.state_dict()),
    "scheduler": digest(scheduler.state_dict()),
    "critic": "",
    "steps_of_scheduler": scheduler.last_epoch,
    "steps_of_optimizer": int(next(iter(optimizer.state.values()))["step"]),
    "batches_of_batch_norm": int(net[1].num_batches_tracked),
}
(args.out / "ends").mkdir(exist_ok=True)
part = args.out / "ends" / f"{WORKER}.part"
part.write_text(json.dumps(end))
part.rename(part.with_suffix(".json"))
loader.close()
