"""One worker of benchmarks.sharded: the model of examples/fsdp_lm.py, by torch's HSDP or by Bagua.

    sharded_worker.py SYSTEM --out DIRECTORY --name HOST ...

SYSTEM: hsdp or bagua. Appends "time steps-committed replicas anonymous-bytes cpu-seconds" to <out>/<host>.log at the
begin of each step, and writes the rank of its replica in its first step to <out>/<host>.replica. Time is the machine's
monotonic clock, which all hosts of the lab share; cpu-seconds are the process's, with all its threads.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler, Subset

from benchmarks.result_file import ROOT

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
Batch = tuple[torch.Tensor, torch.Tensor]


def example() -> ModuleType:
    """examples/fsdp_lm.py, which imports from its own folder."""
    sys.path.insert(0, str(ROOT / "examples"))
    return importlib.import_module("fsdp_lm")


def anonymous_bytes() -> int:
    """Resident memory without files. Pages of libraries are shared by a host's processes, and appear in a forked worker
    when it first touches them, so a worker of Bagua maps in its steps what torchrun's has mapped before."""
    _, resident, of_files = Path("/proc/self/statm").read_text().split()[:3]
    return (int(resident) - int(of_files)) * PAGE_BYTES


class Training:
    """The model and the data, the same for both systems."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.lm = example()
        text = self.lm.read_text(options.batch * options.steps * self.lm.CONTEXT + 1)
        self.windows = self.lm.Windows(text)

    def shard(self, mesh: DeviceMesh) -> nn.Module:
        torch.manual_seed(0)
        net: nn.Module = self.lm.LanguageModel(self.options.width, self.options.blocks)
        for block in net.blocks:  # type: ignore[union-attr]
            fully_shard(block, mesh=mesh)
        fully_shard(net, mesh=mesh)
        return net

    def optimizer(self, net: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(net.parameters(), lr=1e-3)

    def run(
        self, net: Any, optimizer: torch.optim.Optimizer, batches: Iterator[tuple[int, int, Batch]]
    ) -> None:
        with (self.options.out / f"{self.options.name}.log").open("a", buffering=1) as log:
            for step, replicas, (x, y) in batches:
                log.write(f"{time.monotonic()} {step} {replicas} {anonymous_bytes()} {time.process_time()}\n")
                optimizer.zero_grad()
                loss = net(x, y)
                time.sleep(self.options.sleep_s)
                loss.backward()
                optimizer.step()


def hsdp(training: Training) -> None:
    options = training.options
    torch.distributed.init_process_group("gloo")
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    replicas = world // options.replica_size  # each worker trains on samples of its own
    mesh = init_device_mesh("cpu", (replicas, options.replica_size), mesh_dim_names=("replica", "shard"))
    net = training.shard(mesh)
    optimizer = training.optimizer(net)
    whole = Subset(training.windows, range(options.batch * options.steps))
    sampler: DistributedSampler[Any] = DistributedSampler(whole, world, rank)
    loader = DataLoader(whole, options.batch // world, sampler=sampler)
    training.run(net, optimizer, ((step, replicas, batch) for step, batch in enumerate(loader)))
    torch.distributed.destroy_process_group()


def bagua(training: Training) -> None:
    import bagua_core

    options = training.options
    bagua_core.init_process_group()
    net = training.shard(bagua_core.shard_mesh())
    optimizer = training.optimizer(net)
    model = bagua_core.DistributedDataParallel(net, [optimizer], algorithm="gradient_allreduce")
    loader = bagua_core.ElasticDataLoader(training.windows, options.batch, seed=0)

    def batches() -> Iterator[tuple[int, int, Batch]]:
        for _ in loader.epochs(1):
            for batch in loader:
                place = options.out / f"{options.name}.replica"
                if not place.exists():
                    place.write_text(str(bagua_core.replica_rank()))
                yield loader.step, bagua_core.replica_count(), batch

    training.run(model, optimizer, batches())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("system", choices=["hsdp", "bagua"])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--name", required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--batch", type=int, required=True, help="of all replicas")
    parser.add_argument("--replica-size", type=int, required=True)
    parser.add_argument("--width", type=int, required=True)
    parser.add_argument("--blocks", type=int, required=True)
    parser.add_argument("--sleep-s", type=float, default=0.0, help="of each step, behind its forward")
    options = parser.parse_args()
    torch.set_num_threads(1)
    training = Training(options)
    # torch imports it with the first optimizer; the parent of Bagua's workers has done so already
    importlib.import_module("torch._dynamo")
    (options.out / f"{options.name}.before").write_text(str(anonymous_bytes()))
    (hsdp if options.system == "hsdp" else bagua)(training)


if __name__ == "__main__":
    main()
