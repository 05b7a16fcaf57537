"""A script in the style of the original, for tests with real jobs: DataLoader, DistributedSampler, epochs of its own.

Each worker appends a line "iterations world" to <out>/trained-<worker id> after each iteration, and writes
<out>/ends/<worker id>.json if it reaches the end. Written as a user would, without a __main__ guard.
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
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

import bagua_core.torch_api as bagua
from bagua_core.elastic.step import runtime

parser = argparse.ArgumentParser()
parser.add_argument("--out", type=Path, required=True)
parser.add_argument("--samples", type=int, default=1200)
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--batch", type=int, default=12)
parser.add_argument("--step-s", type=float, default=0.05, help="of a step, until there is <out>/hurry")
parser.add_argument("--algorithm", default="gradient_allreduce")
parser.add_argument("--algorithm-arguments", type=json.loads, default={}, metavar="JSON")
parser.add_argument("--elastic", action="store_true", help="the lines that make workers welcome at any time")
parser.add_argument("--parallel", action="store_true", help="wrap the model as under torch's own launcher")
parser.add_argument("--raise-at", type=int, help="the first worker to reach this iteration raises there")
parser.add_argument("--differ", action="store_true", help="build another model in slot 1")
args = parser.parse_args()


def first(what):
    """Whether no worker of this job has asked for `what` before."""
    try:
        (args.out / what).open("x").close()
    except FileExistsError:
        return False
    return True


class Samples(Dataset):
    """Every sample follows from its index."""

    def __len__(self):
        return args.samples

    def __getitem__(self, index):
        x = torch.randn(8, generator=torch.Generator().manual_seed(index))
        return x, int(x.sum() > 0)


class Own(bagua.algorithms.Algorithm):
    """An algorithm of the script's own: plain averaging, by a collective that it calls itself."""

    def reify(self, process_group):
        return OwnImpl(process_group)


class OwnImpl(bagua.algorithms.AlgorithmImpl):
    def init_operations(self, bagua_ddp, bucket):
        def average(name):
            bagua.allreduce_inplace(bucket.flattened_tensor(), bagua.ReduceOp.AVG)

        bucket.append_python_op(average, group=self.process_group)


bagua.algorithms.Algorithm.register("own", Own)


def digest(tensors):
    return hashlib.sha256(b"".join(t.detach().numpy().tobytes() for t in tensors)).hexdigest()


torch.set_num_threads(1)
bagua.init_process_group(elastic=args.elastic)
slot = bagua.get_local_rank()
torch.manual_seed(os.getpid())  # on purpose another on each worker: the job's beginning is rank 0's
width = 33 if args.differ and slot == 1 else 32
model = nn.Sequential(nn.Linear(8, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, 2))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
algorithm = bagua.algorithms.Algorithm.init(args.algorithm, **args.algorithm_arguments)
if args.parallel:
    trained = bagua.data_parallel.DistributedDataParallel(model, algorithm=algorithm)
else:
    trained = model.with_bagua([optimizer], algorithm)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
if args.elastic:
    bagua.register_state("scheduler", scheduler)
    loader = bagua.ElasticDataLoader(Samples(), global_batch_size=2 * args.batch, seed=1)
    epochs = loader.epochs(args.epochs)
else:
    sampler = DistributedSampler(Samples())
    loader = DataLoader(Samples(), args.batch, sampler=sampler)
    epochs = range(args.epochs)

worker = os.environ.get("BAGUA_WORKER_ID", "none").replace("/", "_")
trained_here = (args.out / f"trained-{worker}").open("w")
iterations, worlds, evaluated = 0, set(), []
for _epoch in epochs:
    trained.train()
    for x, y in loader:
        began_s = time.monotonic()
        if args.raise_at == iterations and first("has-raised"):
            raise ValueError(f"a bad sample in iteration {iterations}")
        optimizer.zero_grad()
        F.cross_entropy(trained(x), y).backward()
        optimizer.step()
        iterations += 1
        worlds.add(bagua.get_world_size())
        print(iterations, bagua.get_world_size(), file=trained_here, flush=True)
        if not (args.out / "hurry").exists():
            time.sleep(max(0.0, began_s + args.step_s - time.monotonic()))
    scheduler.step()
    trained.eval()
    count = torch.ones(1)
    torch.distributed.all_reduce(count)  # as the original's scripts call it
    evaluated.append(int(count))

end = {
    "worker": worker,
    "slot": slot,
    "parameters": digest(model.parameters()),
    "iterations": iterations,
    "worlds": sorted(worlds),
    "evaluated": evaluated,
    "steps": runtime.engine().state.name.step,
    "lr": optimizer.param_groups[0]["lr"],
    "optimizer_steps": int(next(iter(optimizer.state.values()))["step"]),
}
(args.out / "ends").mkdir(exist_ok=True)
part = args.out / "ends" / f"{worker}.part"
part.write_text(json.dumps(end))
part.rename(part.with_suffix(".json"))
