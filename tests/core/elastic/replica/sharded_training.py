"""A worker that trains a small sharded model, started by `leader.py` in a process of its own.

Writes <out>/steps/<worker>: the step that it is in. At its end it writes <out>/ends/<worker>.pt: its place, its shards,
and the stripes of which its copy of the state consisted. With <out>/hurry it takes no rest between steps.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, SequenceParallel, parallelize_module

import bagua_core as bagua
from bagua_core.elastic.heal import heal
from bagua_core.elastic.state.flat_tensors import byte_ranges

SAMPLES = 96
GLOBAL_BATCH = 12
LEARNING_RATE = 0.01  # small enough that differences of rounding do not grow from step to step


class Samples(torch.utils.data.Dataset[Any]):
    """The same in every process. The 7 inputs and 5 hidden units do not divide by the shards."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        self.x = torch.randn(SAMPLES, 7, generator=generator)
        self.y = self.x.sum(1, keepdim=True) * torch.ones(3)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.x[index], self.y[index]


def model(parallel: bool = False) -> nn.Sequential:
    torch.manual_seed(0)
    if parallel:
        return nn.Sequential(nn.Linear(7, 6), nn.LayerNorm(6), nn.Linear(6, 3))
    return nn.Sequential(nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 3))


# each worker of a replica normalizes some of the samples by the same weights
PLAN = {
    "0": ColwiseParallel(output_layouts=Shard(0)),
    "1": SequenceParallel(sequence_dim=0),
    "2": ColwiseParallel(input_layouts=Shard(0), output_layouts=Replicate()),
}


def _further_groups() -> None:
    """Inside a replica a script may make torch's groups and meshes as it likes."""
    size = dist.get_world_size()
    group = dist.new_group(list(range(size)))
    ones = torch.ones(1)
    dist.all_reduce(ones, group=group)
    assert int(ones) == size
    mesh = init_device_mesh("cpu", (size, 1), mesh_dim_names=("shard", "tensor"))
    assert mesh["shard"].size() == size


def _arriving_stripes() -> list[tuple[int, int, int]]:
    """Of each stripe that arrives whole from now on: the holders of the copy, which of them sent it, its bytes."""
    stripes: list[tuple[int, int, int]] = []
    receive = heal._receive_stripe

    def noted(
        communicator: Any, received: Any, total_bytes: int, holders: Any, part: int, *more: Any
    ) -> None:
        receive(communicator, received, total_bytes, holders, part, *more)
        begin, end = byte_ranges(total_bytes, len(holders), part)
        stripes.append((len(holders), holders[part], end - begin))

    heal._receive_stripe = noted
    return stripes


def local(tensor: Any) -> torch.Tensor:
    found: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return found.detach().clone()


def train(
    environment: dict[str, str],
    out: Path,
    epochs: int = 2,
    step_s: float = 0.02,
    algorithm: str = "gradient_allreduce",
    accumulate: bool = False,
    root: bool = True,
    batch: int = GLOBAL_BATCH,
    parallel: bool = False,
) -> None:
    """environment: of a worker; empty for a world of one. root: the whole module is sharded too, and not some layers
    alone, so that a replica's workers get samples of their own. parallel: the model is cut by PLAN alone."""
    os.environ.update(environment)
    torch.set_num_threads(1)
    worker = environment.get("BAGUA_WORKER_ID", "alone")
    if environment:
        log = os.open(out / f"log-{worker}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
    stripes = _arriving_stripes()
    bagua.init_process_group()
    module = model(parallel)
    if environment:
        mesh = bagua.shard_mesh()
        _further_groups()
    if environment and parallel:
        parallelize_module(module, mesh, PLAN)
    elif environment:
        for layer in (module[0], module[2]):
            fully_shard(layer, mesh=mesh)
        if root:
            fully_shard(module, mesh=mesh)
    optimizer = torch.optim.SGD(module.parameters(), lr=LEARNING_RATE, momentum=0.9)
    wrapped = bagua.DistributedDataParallel(module, optimizers=[optimizer], algorithm=algorithm)
    loader = bagua.ElasticDataLoader(
        Samples(),
        global_batch_size=batch,
        seed=3,
        divide_in_replica=root,
        **({"max_local_batch_size": 2} if accumulate else {}),
    )
    steps, ends = out / "steps", out / "ends"
    for directory in (steps, ends):
        directory.mkdir(exist_ok=True)
    step = 0
    for _ in loader.epochs(epochs):
        for x, y in loader:
            (steps / f".{worker}").write_text(str(step))
            os.replace(steps / f".{worker}", steps / worker)
            loss = nn.functional.mse_loss(wrapped(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            if not (out / "hurry").exists():
                (out / f"computes-{environment.get('BAGUA_WORKER_ID', 'alone')}").touch()
                time.sleep(step_s)
    reductions = wrapped._exchange.reductions
    place = (bagua.replica_rank(), bagua.shard_rank(), bagua.replica_count(), bagua.replica_size())
    bagua.shutdown()
    torch.save(
        {
            "place": place,
            "parameters": [local(p) for p in module.parameters()],
            "momentum": [local(s["momentum_buffer"]) for s in optimizer.state.values()],
            "stripes": stripes,
            "reductions": reductions,
        },
        ends / f"part-{worker}",
    )
    os.replace(ends / f"part-{worker}", ends / f"{worker}.pt")
    os._exit(0)
