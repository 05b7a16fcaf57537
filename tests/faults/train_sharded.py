"""The script of jobs with replicas: a small model that is cut as --cut says, steps as long as the test asks.

Each worker that reaches the end writes <out>/ends/<worker id>.json: its shard rank, digests of its shards, how many
values they have, and the most bytes that it sent to other replicas from one batch to the next. The worker that --at
names, as REPLICA,SHARD of the first generation, dies in the step --dies-in: in its forward, its all-gather, its
reduce-scatter, before its vote or before its sum across replicas; or it raises an error in its forward; or it loses the
outcome of the vote or of its lane, and goes on.
"""

import argparse
import hashlib
import json
import os
import signal
import time
from itertools import pairwise
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import bagua_core as bagua
from bagua_core.communication import traffic
from bagua_core.communication.communicator import CollectiveFailed
from bagua_core.elastic.step import runtime
from tests.lab import pace

parser = argparse.ArgumentParser()
parser.add_argument("--out", type=Path, required=True)
parser.add_argument("--samples", type=int, required=True)
parser.add_argument("--epochs", type=int, required=True)
parser.add_argument("--batch", type=int, default=24)
parser.add_argument(
    "--step-s",
    type=float,
    help="least duration of a step until there is <out>/hurry; by default tests/lab/pace.py has it",
)
parser.add_argument("--algorithm", default="GradientAllreduce", help="a class")
parser.add_argument("--algorithm-arguments", type=json.loads, default={}, metavar="JSON")
parser.add_argument("--micro-batch", type=int, help="samples of a micro-batch; by default one a step")
parser.add_argument(
    "--evaluates", action="store_true", help="reduce a loss over all workers after each epoch"
)
parser.add_argument(
    "--sums",
    action="store_true",
    help="add up the samples' numbers across replicas in each step, and compare the sums after each epoch",
)
parser.add_argument(
    "--cut",
    choices=["data", "tensor", "both"],
    default="data",
    help="by fully_shard, by tensor parallelism, or by both on a mesh of two dimensions",
)
parser.add_argument("--width", type=int, help="of the first two layers; by default few values")
parser.add_argument("--at", default="")
parser.add_argument("--dies-in", type=int, default=-1, help="this step")
parser.add_argument(
    "--dies",
    choices=[
        "forward",
        "gather",
        "scatter",
        "vote",
        "sum",
        "evaluation",
        "raises",
        "misses-vote",
        "misses-lane",
    ],
    default="",
)
args = parser.parse_args()

WORKER = os.environ.get("BAGUA_WORKER_ID", "alone")
torch.set_num_threads(1)
x = torch.randn(args.samples, 16, generator=torch.Generator().manual_seed(1))
y = (x.sum(1) > 0).long()
torch.manual_seed(0)
width = args.width or (33 if args.cut == "data" else 32)  # tensor parallelism divides it evenly
net = nn.Sequential(nn.Linear(16, width), nn.Tanh(), nn.Linear(width, 33), nn.Tanh(), nn.Linear(33, 2))

bagua.init_process_group()
mesh = bagua.shard_mesh()
of_data, of_tensors = mesh, mesh
if args.cut == "both":
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    of_data, of_tensors = grid["data"], grid["tensor"]
if args.cut != "data":
    parallelize_module(net, of_tensors, {"0": ColwiseParallel(), "2": RowwiseParallel()})
if args.cut != "tensor":
    for layer in (net[0], net[2]):
        fully_shard(layer, mesh=of_data)
    fully_shard(net, mesh=of_data)
optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
loader = bagua.ElasticDataLoader(
    torch.utils.data.TensorDataset(x, y, torch.arange(args.samples)),
    args.batch,
    seed=3,
    max_local_batch_size=args.micro_batch,
    # workers that share the tensors of a layer compute the same samples
    divide_in_replica={"data": True, "tensor": False, "both": of_data}[args.cut],
)
algorithm = getattr(bagua.algorithms, args.algorithm)(**args.algorithm_arguments)
model = bagua.DistributedDataParallel(net, [optimizer], algorithm=algorithm)
engine = runtime.engine()
is_chosen = args.at == f"{bagua.replica_rank()},{bagua.shard_rank()}"


def is_due(where):
    return is_chosen and args.dies == where and loader.step == args.dies_in


def die(where):
    if is_due(where):
        print(f"dies in the {where} of step {args.dies_in}", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)


class DiesInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, value):
        return value.clone()

    @staticmethod
    def backward(ctx, gradient):
        die("scatter")
        return gradient


def fail():
    if is_due("raises"):
        raise ValueError("a mistake of the script")


# the first layer has gathered its parameters, and the mate waits in the next layer's all-gather
net[1].register_forward_hook(lambda *_: die("gather"))
net[1].register_forward_hook(lambda *_: fail())
net[3].register_forward_hook(lambda *_: die("forward"))
# the last layer's gradients are reduced within the replica, and the others' are not
net[2].register_forward_hook(lambda _, __, out: DiesInBackward.apply(out))


def lose_outcomes(vote=engine._vote, reduction_done=engine.reduction_done):
    def voted(what):
        die("vote")
        pair = vote(what)
        if pair is None or not is_due("misses-vote"):
            return pair
        args.dies = ""
        print(f"missed the vote of step {args.dies_in}", flush=True)
        engine.reduction_failed(CollectiveFailed("its result was lost"))
        return None

    def reduced(pair):
        if not is_due("misses-lane"):
            return reduction_done(pair)
        args.dies = ""
        print(f"missed the reduction of step {args.dies_in}", flush=True)
        engine.reduction_failed(CollectiveFailed("the lane's result was lost"))
        return engine.reduction_given_up()

    engine._vote, engine.reduction_done = voted, reduced


lose_outcomes()


def local(value):
    return (value.to_local() if hasattr(value, "to_local") else value).detach().contiguous()


def digest(tensors):
    return hashlib.sha256(b"".join(local(t).numpy().tobytes() for t in tensors)).hexdigest()


class Sums:
    """Of the numbers of all samples that workers with this shard computed, and of these workers in all steps."""

    def __init__(self):
        self.total = torch.zeros(2, dtype=torch.int64)

    def state_dict(self):
        return {"total": self.total}

    def load_state_dict(self, state):
        self.total = state["total"].clone()

    def add(self, numbers):
        die("sum")
        found = torch.tensor([int(numbers.sum()), 1])
        dist.all_reduce(found, group=group)
        assert dist.get_rank(group) == bagua.replica_rank() < dist.get_world_size(group)
        self.total = self.total + found

    def compare(self):
        """Of all replicas. Again if one is lost meanwhile."""
        die("evaluation")
        while True:
            rows = [torch.zeros_like(self.total) for _ in range(group.size())]
            try:
                dist.all_gather(rows, self.total, group=group)
            except bagua.MembersChanged:
                continue
            assert all(torch.equal(row, self.total) for row in rows), rows
            greatest = functional.all_reduce(self.total, "max", group)
            assert torch.equal(greatest + 0, self.total), greatest
            dist.barrier(group=group)
            return len(rows)


group, sums = bagua.replica_group(), Sums()
bagua.register_state("sums", sums)
(args.out / "ends").mkdir(exist_ok=True)
steps = args.epochs * args.samples // args.batch
sent_bytes = []
for epoch in loader.epochs(args.epochs):
    for inputs, targets, numbers in loader:
        began_s = time.monotonic()
        sent_bytes.append(traffic.to_collectives.total_bytes)
        loss = F.cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if args.sums:
            sums.add(numbers)
        pace.wait(args.out, began_s + (args.step_s or pace.least_s(loader.step, steps)))
    if args.sums:
        print(f"epoch {epoch}: the sums of {sums.compare()} replicas are equal", flush=True)
    if args.evaluates:
        with torch.no_grad():
            model.eval()
            found = F.cross_entropy(model(x[:64]), y[:64])
            die("evaluation")
            evaluated = bagua.allreduce(found, bagua.ReduceOp.AVG)
            model.train()
        print(f"epoch {epoch}: {evaluated:.3f} on {bagua.replica_count()} replicas", flush=True)

bagua.shutdown()
end = {
    "worker": WORKER,
    "shard": mesh.get_local_rank(),
    "parameters": digest(net.parameters()),
    "optimizer": digest(v for s in optimizer.state.values() for v in s.values()),
    "sums": sums.total.tolist(),
    "values": sum(local(p).numel() for p in net.parameters()),
    # a worker that joined for the last step has no second batch
    "most_sent_bytes": max((after - before for before, after in pairwise(sent_bytes)), default=0),
}
(args.out / "ends" / f"{WORKER.replace('/', '_')}.json").write_text(json.dumps(end))
