"""The fault tests' script: a small model with everything that has state, steps as long as the test asks.

Each worker that reaches the end writes <out>/ends/<worker id>.json: digests and counters of what it holds.
Written as a user would, without a __main__ guard.
"""

import argparse
import hashlib
import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

import bagua_core as bagua
from bagua_core.elastic.heal import heal
from tests.lab import pace

parser = argparse.ArgumentParser()
parser.add_argument("--out", type=Path, required=True)
parser.add_argument("--samples", type=int, default=576)
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--batch", type=int, default=24)
parser.add_argument(
    "--step-s",
    type=float,
    help="least duration of a step until there is <out>/hurry; by default tests/lab/pace.py has it",
)
parser.add_argument("--loader-workers", type=int, default=0)
parser.add_argument("--sampler", action="store_true", help="a sampler of torch's gives the order")
parser.add_argument(
    "--stream", choices=["plain", "state"], help="the data set is only iterated; with a state or not"
)
parser.add_argument("--two-parts", action="store_true", help="a second model and optimizer in each step")
parser.add_argument("--say", action="store_true", help="print a line when the script begins")
parser.add_argument("--evaluate", action="store_true", help="reduce a loss over all workers after each epoch")
parser.add_argument("--raise-at", type=int, help="the first worker to reach this step raises there")
parser.add_argument("--raise-in-slot", type=int, help="only in this slot")
parser.add_argument("--hang-at", type=int, help="the first worker to reach this step hangs there")
parser.add_argument("--hang-in-slot", type=int, help="only in this slot")
parser.add_argument("--hang-s", type=float, default=3600.0)
parser.add_argument(
    "--slow-slot", type=int, help="its workers compute 0.1 s longer, until there is <out>/hurry"
)
parser.add_argument("--algorithm", default="gradient_allreduce")
parser.add_argument("--algorithm-arguments", type=json.loads, default={}, metavar="JSON")
parser.add_argument("--qadam-optimizer", action="store_true", help="QAdam's, whatever the algorithm")
parser.add_argument("--width", type=int, default=64, help="of the model's hidden layer")
parser.add_argument("--failpoints-once", action="store_true", help="for a slot's first worker only")
parser.add_argument(
    "--chunk-s", type=float, help="a copy of the state takes so long for each of its chunks, which are small"
)
args = parser.parse_args()


def first(what):
    """Whether no worker of this job has asked for `what` before."""
    try:
        (args.out / what).open("x").close()
    except FileExistsError:
        return False
    return True


def hang_here():
    time.sleep(args.hang_s)


AGENT, WORKER = os.environ.get("BAGUA_AGENT_ID", "none"), os.environ.get("BAGUA_WORKER_ID", "none")
SLOT = int(os.environ.get("BAGUA_SLOT", "0"))
if args.failpoints_once and not first(f"has-failpoints-{AGENT}-{SLOT}"):
    del os.environ["BAGUA_FAILPOINTS"]

torch.set_num_threads(1)


if args.chunk_s:
    heal.CHUNK_BYTES, read = 1000, heal.pinned_chunks.read
    heal.pinned_chunks.read = lambda *chunk: time.sleep(args.chunk_s) or read(*chunk)


class Samples(torch.utils.data.Dataset):
    """The same in every process."""

    def __init__(self):
        self.x = torch.randn(args.samples, 16, generator=torch.Generator().manual_seed(1))
        self.y = (self.x.sum(1) > 0).long().tolist()

    def __len__(self):
        return args.samples

    def __getitem__(self, index):
        return self.x[index], self.y[index]


if args.say:
    print(f"hello from slot {os.environ['BAGUA_SLOT']}", flush=True)


class Stream(torch.utils.data.IterableDataset):
    """Another order in each epoch, drawn from the global generator."""

    def __init__(self, samples):
        self.samples = samples
        self.order, self.at = None, 0

    def __iter__(self):
        if self.order is None or args.stream == "plain":
            self.order, self.at = torch.randperm(len(self.samples)).tolist(), 0
        while self.at < len(self.order):
            self.at += 1
            yield self.samples[self.order[self.at - 1]]
        self.order = None


class StreamWithState(Stream):
    def state_dict(self):
        return {"order": self.order, "at": self.at}

    def load_state_dict(self, state):
        self.order, self.at = state["order"], state["at"]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(16, args.width),
            nn.BatchNorm1d(args.width),
            nn.ReLU(),
            nn.Dropout(0.1),
            nn.Linear(args.width, 2),
        )

    def forward(self, x):
        return self.layers(x)


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


bagua.init_process_group()
torch.manual_seed(os.getpid())  # on purpose another on each worker: the job's beginning is rank 0's
net = Net()
if args.algorithm == "qadam":
    optimizer = bagua.algorithms.QAdamOptimizer(net.parameters(), lr=1e-2, warmup_steps=20)
    algorithm = bagua.algorithms.QAdam(optimizer, **args.algorithm_arguments)
elif args.algorithm == "power_sgd":
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
    state = powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=10, min_compression_rate=1)
    algorithm = bagua.algorithms.Hook(powerSGD_hook.powerSGD_hook, state)
else:
    if args.qadam_optimizer:
        optimizer = bagua.algorithms.QAdamOptimizer(net.parameters(), lr=1e-2, warmup_steps=5)
    else:
        optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
    algorithm = type(bagua.algorithms.find_algorithm(args.algorithm))(**args.algorithm_arguments)
# Several: a hook has no order of its own
buckets = {"bucket_cap_mb": 0.01} if args.algorithm == "power_sgd" else {}
model = bagua.DistributedDataParallel(net, optimizers=[optimizer], algorithm=algorithm, **buckets)
samples = Samples()
stream = {None: None, "plain": Stream, "state": StreamWithState}[args.stream]
loader = bagua.ElasticDataLoader(
    samples if stream is None else stream(samples),
    global_batch_size=args.batch,
    seed=1,
    sampler=torch.utils.data.RandomSampler(samples) if args.sampler else None,
    num_workers=args.loader_workers,
)
critic = nn.Linear(16, 1)
critic_optimizer = torch.optim.Adam(critic.parameters(), lr=1e-3)
if args.two_parts:
    critic_model = bagua.DistributedDataParallel(critic, optimizers=[critic_optimizer])
steps = args.epochs * -(-args.samples // args.batch)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
bagua.register_state("scheduler", scheduler)

epochs_ended = 0
for epoch in loader.epochs(args.epochs):
    began_s = time.monotonic()
    for x, y in loader:
        is_bad = args.raise_at is not None and scheduler.last_epoch >= args.raise_at
        if is_bad and args.raise_in_slot in (None, SLOT) and first("has-raised"):
            raise ValueError(f"a bad sample in step {args.raise_at}")
        is_slow = args.hang_at is not None and scheduler.last_epoch >= args.hang_at
        if is_slow and args.hang_in_slot in (None, SLOT) and first("has-hung"):
            hang_here()
        if args.slow_slot == SLOT and not (args.out / "hurry").exists():
            time.sleep(0.1)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        bagua.report(loss=1.0 + 2.0 * bagua.get_rank())  # a mean by which the number of workers shows
        if args.two_parts:
            critic_optimizer.zero_grad()
            target = model(x).detach()[:, :1]  # the first part's new parameters, as in adversarial training
            F.mse_loss(critic_model(x), target).backward()
            critic_optimizer.step()
        scheduler.step()
        while (args.out / "hold").exists():
            time.sleep(0.02)
        step_s = pace.least_s(scheduler.last_epoch - 1, steps) if args.step_s is None else args.step_s
        pace.wait(args.out, began_s + step_s)
        began_s = time.monotonic()
    if args.evaluate:
        model.eval()
        with torch.no_grad():
            count = bagua.allreduce(torch.ones(1))
        model.train()
        print(f"evaluated epoch {epoch} on {count.item():g} workers", file=sys.stderr, flush=True)

end = {
    "worker": WORKER,
    "parameters": digest(dict(net.named_parameters())),
    # where replicas differ by nature their parameters are averaged at the end, optimizers stay apart
    "optimizer": digest(optimizer.state_dict()) if algorithm.equal_states else "",
    "travelling": digest(dict(model.travelling())),
    "dropped": getattr(model._exchange, "dropped", 0),
    "scheduler": digest(scheduler.state_dict()),
    "critic": digest(dict(critic.named_parameters())) if args.two_parts else "",
    "operation": type(getattr(model._exchange, "_operation", None)).__name__,
    "buckets": len(model._exchange._buckets) if hasattr(model._exchange, "_buckets") else 0,
    "steps_of_scheduler": scheduler.last_epoch,
    "steps_of_optimizer": int(next(iter(optimizer.state.values()))["step"]) if optimizer.state else 0,
    "batches_of_batch_norm": int(net.layers[1].num_batches_tracked),
}
(args.out / "ends").mkdir(exist_ok=True)
if args.two_parts:
    end["batches_of_batch_norm"] //= 2  # two forwards a step
    end["steps_of_critic"] = int(critic_optimizer.state[critic.weight]["step"])
part = args.out / "ends" / f"{WORKER}.part"
part.write_text(json.dumps(end))
part.rename(part.with_suffix(".json"))
loader.close()
