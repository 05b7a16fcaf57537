"""One worker of benchmarks.fidelity: trains a task under one system, for each of its seeds.

All systems see the same initial weights, samples and random numbers (dropout) in the same order. Under bagua-launch
for Bagua's algorithms, with RANK and WORLD_SIZE for DDP. Each worker writes <out>/<seed>-<worker>.json; the first
one's has the losses of the model that came out.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR

from bagua_core.data.partition import batch_count, epoch_order, global_batch, share
from bagua_core.elastic.step.step_seed import seed_generators
from benchmarks import algorithm_choices
from benchmarks.algorithm_choices import Settings
from benchmarks.fidelity_tasks import TASKS, Pieces, Task, load_pieces
from benchmarks.tcp_sent import tcp_sent_bytes


class Training:
    """One seed of one task on this worker."""

    def __init__(self, task: Task, pieces: Pieces, epochs: int, seed: int) -> None:
        self.task = task
        self.epochs = epochs
        self.seed = seed
        self.train, self.held_out = pieces
        self.steps_per_epoch = batch_count(len(self.train), task.global_batch, False)
        self.steps = epochs * self.steps_per_epoch
        torch.manual_seed(seed)
        self.net = task.build()
        self.curve: list[float] = []
        self._sent_before = self.sent_bytes = 0  # from the first step to the last

    @property
    def settings(self) -> Settings:
        return self.task.settings_for(self.steps)

    def step(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        scheduler: CosineAnnealingLR,
        x: torch.Tensor,
        y: torch.Tensor,
    ) -> None:
        if not self.curve:
            self._sent_before = tcp_sent_bytes()
        optimizer.zero_grad()
        loss = self.task.loss(model, x, y)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        scheduler.step()
        self.curve.append(loss.item())
        if len(self.curve) == self.steps:
            self.end_of_steps()

    def end_of_steps(self) -> None:
        self.sent_bytes = tcp_sent_bytes() - self._sent_before

    def write(self, out: Path, worker: int, rounds: int | None = None) -> None:
        result: dict[str, object] = {"curve": self.curve, "rounds": rounds, "sent_bytes": self.sent_bytes}
        if worker == 0:
            result["train_loss"] = self.task.loss_over(self.net, self.train)
            result["held_out_loss"] = self.task.loss_over(self.net, self.held_out)
        (out / f"{self.seed}-{worker}.json").write_text(json.dumps(result))


def train_ddp(training: Training, system: str, out: Path) -> None:
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    task, rank, workers = training.task, dist.get_rank(), dist.get_world_size()
    with_hook = system == algorithm_choices.HOOKED
    model = DistributedDataParallel(
        training.net,
        broadcast_buffers=False,  # its buffers are constants
        bucket_cap_mb=algorithm_choices.ONE_BUCKET_MB if with_hook else None,
    )
    if with_hook:
        hook, state = algorithm_choices.power_sgd_hook(training.settings)
        model.register_comm_hook(state, hook)
    optimizer: torch.optim.Optimizer
    if system == "ddp_adam":
        optimizer = torch.optim.Adam(training.net.parameters(), lr=training.settings.adam_lr)
    else:
        optimizer = algorithm_choices.plain_optimizer(training.net.parameters(), training.settings)
    scheduler = CosineAnnealingLR(optimizer, training.steps)
    for step in range(training.steps):
        epoch, batch = divmod(step, training.steps_per_epoch)
        order = epoch_order(training.seed, epoch, len(training.train), True)
        indices = global_batch(order, batch, task.global_batch)
        own = share(len(indices), workers, rank)
        x, y = training.train[indices[own.start : own.stop]]
        seed_generators(training.seed, step, rank)
        training.step(model, optimizer, scheduler, x, y)
    training.write(out, rank)


def train_bagua(training: Training, system: str, out: Path, workers: int) -> None:
    import bagua_core as bagua

    bagua.init_process_group()
    build = algorithm_choices.CHOICES[system]
    optimizer, algorithm = build(list(training.net.parameters()), training.settings)
    model = bagua.DistributedDataParallel(
        training.net, optimizers=[optimizer], algorithm=algorithm, broadcast_buffers=False
    )
    loader = bagua.ElasticDataLoader(
        training.train, global_batch_size=training.task.global_batch, seed=training.seed
    )
    scheduler = CosineAnnealingLR(optimizer, training.steps)
    bagua.register_state("scheduler", scheduler)
    for _ in loader.epochs(training.epochs):
        for x, y in loader:
            if bagua.get_world_size() != workers:
                raise RuntimeError(f"a step with {bagua.get_world_size()} of {workers} workers: a fault")
            training.step(model, optimizer, scheduler, x, y)
    if algorithm.round_steps is not None:  # in rounds workers share the job's samples by their speeds
        training.end_of_steps()
    elif len(training.curve) != training.steps:
        raise RuntimeError(f"{len(training.curve)} steps instead of {training.steps}: some were done again")
    training.write(out, bagua.get_local_rank(), algorithm_choices.rounds_of(model))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--task", choices=sorted(TASKS), required=True)
    systems = [*algorithm_choices.CHOICES, "ddp_sgd", "ddp_adam", algorithm_choices.HOOKED]
    parser.add_argument("--system", choices=systems, required=True)
    parser.add_argument("--data", type=Path, required=True, help="the task's pieces, saved")
    parser.add_argument("--seeds", required=True, help="as 0,1,2; one of Bagua's takes one only")
    parser.add_argument("--epochs", type=int, required=True)
    parser.add_argument("--workers", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    task, pieces = TASKS[args.task], load_pieces(args.data)
    seeds = [int(seed) for seed in args.seeds.split(",")]
    if args.system in algorithm_choices.CHOICES:
        (seed,) = seeds  # a job has one model, from its first step to its last
        train_bagua(Training(task, pieces, args.epochs, seed), args.system, args.out, args.workers)
        return
    rank = int(os.environ["RANK"])
    store = f"file://{args.out / 'store'}"
    torch.distributed.init_process_group("gloo", store, rank=rank, world_size=args.workers)
    for seed in seeds:
        train_ddp(Training(task, pieces, args.epochs, seed), args.system, args.out)
    # Rank 0 measures a little longer than the others; torch's Gloo can abort a process ("terminate called without an
    # active exception") that ends while it has threads, so all leave together, and without C++'s destructors.
    torch.distributed.barrier()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
