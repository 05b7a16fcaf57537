"""One worker of benchmarks.uneven_workers: digits, on a processor that takes `--sample-s` for each sample.

    uneven_worker.py SYSTEM --out DIRECTORY ...

SYSTEM: ddp, or a choice of Bagua's. Appends "time samples" to <out>/<host>.log for each batch; the worker of rank 0
writes the losses at the end to <out>/losses.json.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from benchmarks.fidelity_tasks import TASKS, Task

GLOBAL_BATCH = 64
LR = 0.05
ASYNC_INTERVAL_MS = 100  # less than a round takes, so each commit begins an average or takes one in
REPEATED = 8  # digits in an epoch, so that it has several rounds


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("system")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--name", required=True)
    parser.add_argument("--sample-s", type=float, required=True)
    parser.add_argument("--sync-every", type=int, required=True)
    parser.add_argument("--epochs", type=int, required=True)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(options.seed)
    task = TASKS["digits"]
    once, held_out = task.pieces()
    train = TensorDataset(*(t.repeat(REPEATED, *[1] * (t.dim() - 1)) for t in once.tensors))
    net = task.build()
    optimizer = torch.optim.SGD(net.parameters(), lr=LR)
    model, batches, is_first = (ddp if options.system == "ddp" else bagua)(options, net, optimizer, train)
    with (options.out / f"{options.name}.log").open("a", buffering=1) as log:
        for x, y in batches:
            began_s = time.monotonic()
            optimizer.zero_grad()
            task.loss(model, x, y).backward()
            optimizer.step()
            time.sleep(max(0.0, options.sample_s * len(y) - (time.monotonic() - began_s)))
            log.write(f"{time.monotonic()} {len(y)}\n")
    if is_first():
        write_losses(options.out, task, net, once, held_out)


def write_losses(
    out: Path, task: Task, net: nn.Module, train: TensorDataset, held_out: TensorDataset
) -> None:
    losses = {"training": task.loss_over(net, train), "held out": task.loss_over(net, held_out)}
    (out / "losses.json").write_text(json.dumps(losses))


def ddp(options: Any, net: nn.Module, optimizer: Any, train: TensorDataset) -> Any:
    del optimizer
    torch.distributed.init_process_group("gloo")
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    sampler: DistributedSampler[Any] = DistributedSampler(train, seed=options.seed)
    loader = DataLoader(train, GLOBAL_BATCH // size, sampler=sampler)

    def batches() -> Iterator[Any]:
        for epoch in range(options.epochs):
            sampler.set_epoch(epoch)
            yield from loader

    return nn.parallel.DistributedDataParallel(net), batches(), lambda: rank == 0


def bagua(options: Any, net: nn.Module, optimizer: torch.optim.Optimizer, train: TensorDataset) -> Any:
    import bagua_core

    algorithms = {
        "gradient_allreduce": "gradient_allreduce",
        "step": bagua_core.algorithms.LocalSGD(options.sync_every),
        "round": bagua_core.algorithms.LocalSGD(options.sync_every, unit="round"),
        "async": bagua_core.algorithms.AsyncModelAverage(sync_interval_ms=ASYNC_INTERVAL_MS),
        "async_round": bagua_core.algorithms.AsyncModelAverage(
            sync_interval_ms=ASYNC_INTERVAL_MS, unit="round", sync_every=options.sync_every
        ),
    }
    loader = bagua_core.ElasticDataLoader(train, GLOBAL_BATCH, seed=options.seed)
    model = bagua_core.DistributedDataParallel(net, [optimizer], algorithm=algorithms[options.system])

    def batches() -> Iterable[Any]:
        for _ in loader.epochs(options.epochs):
            yield from loader

    return model, batches(), lambda: os.environ.get("RANK", "0") == "0"


if __name__ == "__main__":
    main()
