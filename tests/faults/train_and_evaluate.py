"""A script that takes long somewhere, until <out>/hurry is there. Writes how it ended, and its state at the end."""

import argparse
import os
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

import bagua_core as bagua
from bagua_core.elastic.step import leaving

parser = argparse.ArgumentParser()
parser.add_argument("--out", type=Path, required=True)
parser.add_argument("--samples", type=int)
parser.add_argument("--epochs", type=int)
parser.add_argument("--after-step", type=int, default=0, help="evaluate in the loop, after this many steps")
parser.add_argument("--after-epochs", type=int, default=0, help="evaluate between epochs, after this many")
parser.add_argument(
    "--in-step", type=int, default=0, help="stand in the forward of this step, counted from 1"
)
parser.add_argument("--slowly", choices=("waits", "computes", "sleeps", "compiles"), default="waits")
parser.add_argument(
    "--algorithm", default="gradient_allreduce", help="rounds: local SGD, two rounds an epoch"
)
parser.add_argument("--only-first", action="store_true", help="global rank 0 evaluates alone")
parser.add_argument("--in-optimizer", type=int, default=0, help="stand in the optimizer's step in this step")
parser.add_argument("--ignores", action="store_true", help="the interrupt")
parser.add_argument(
    "--write-s", type=float, help="how long the first part of a checkpoint is expected to take"
)
args = parser.parse_args()
if args.write_s is not None:
    leaving.FIRST_WRITE_S = args.write_s

bagua.init_process_group()
torch.manual_seed(5)
net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 1))


class SlowAdam(torch.optim.Adam):
    def step(self, closure=None):  # type: ignore[no-untyped-def, override]
        if loader.step + 1 == args.in_optimizer and not hurry.exists():
            with torch.no_grad():
                next(net.parameters()).add_(1.0)  # half a step
            take_long()
        return super().step(closure)


optimizer = SlowAdam(net.parameters(), lr=0.01)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.9)
bagua.register_state("schedule", schedule)
rounds = bagua.algorithms.LocalSGD(sync_every=5, unit="round")
algorithm = rounds if args.algorithm == "rounds" else args.algorithm
model = bagua.DistributedDataParallel(net, optimizers=[optimizer], algorithm=algorithm)
inputs = torch.randn(args.samples, 4, generator=torch.Generator().manual_seed(1))
samples = torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True))
loader = bagua.ElasticDataLoader(samples, global_batch_size=8, seed=1)
worker = os.environ["BAGUA_WORKER_ID"]
hurry = args.out / "hurry"


def take_long() -> None:
    (args.out / f"takes-long-{worker}").touch()
    while not hurry.exists():
        try:
            if args.slowly == "sleeps":
                time.sleep(600)
            if args.slowly in ("waits", "compiles"):
                time.sleep(0.02)
            else:
                for _ in range(10_000):
                    pass
        except KeyboardInterrupt:
            if not args.ignores:
                raise


def evaluate() -> None:
    if args.only_first and bagua.get_rank() != 0:
        return
    model.eval()
    with torch.no_grad():
        model(inputs[:8])
        if args.slowly == "compiles":
            torch.compile(lambda x: x.sin() + 1, backend=compile_slowly)(inputs[:8])
        else:
            take_long()
    model.train()


def compile_slowly(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., object]:
    take_long()
    return graph.forward


how = "at its end"
try:
    for epoch in loader.epochs(args.epochs):
        for x, y in loader:
            optimizer.zero_grad()
            if loader.step + 1 == args.in_step:
                take_long()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
            schedule.step()
            if loader.step + 1 == args.after_step:
                evaluate()
            if not hurry.exists():
                time.sleep(0.02)
        if epoch + 1 == args.after_epochs:
            evaluate()
    values = [t.double().sum().item() for t in (*net.state_dict().values(),)]
    (args.out / f"values-{bagua.get_rank()}").write_text(repr((values, schedule.get_last_lr())))
except KeyboardInterrupt as error:
    how = type(error).__name__
    raise
finally:
    (args.out / f"ended-{worker}").write_text(how)
