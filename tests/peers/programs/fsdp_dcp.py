"""FSDP2 with asynchronous distributed checkpoints: each worker holds a shard, and saves it while it trains on."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import ending_once
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

STEPS, EVERY = 12, 3


def main(out: Path) -> None:
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.GELU(), torch.nn.Linear(32, 1))
    mesh = init_device_mesh("cpu", (world_size,))
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    data = torch.randn(STEPS, world_size, 4, 8, generator=torch.Generator().manual_seed(1))
    # The saving thread's own: its collectives and the training's may come in any order.
    savers = dist.new_group(backend="gloo")
    newest, first = out / "newest", 0
    if newest.exists():
        first = int(newest.read_text())
        module, optim = get_state_dict(model, optimizer)
        state = {"model": module, "optim": optim}
        dcp.load(state, checkpoint_id=out / f"step-{first}")
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
    writing = None
    for step in range(first, STEPS):
        optimizer.zero_grad()
        model(data[step, rank]).square().mean().backward()
        optimizer.step()
        if (step + 1) % EVERY:
            continue
        if writing is not None:
            finish(writing, out, rank)
        module, optim = get_state_dict(model, optimizer)
        state = {"model": module, "optim": optim}
        saving = dcp.async_save(state, checkpoint_id=out / f"step-{step + 1}", process_group=savers)
        writing = (step + 1, saving)
        ending_once.here(out, rank, step + 1)
    assert writing is not None
    finish(writing, out, rank)
    whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if rank == 0:
        torch.save(whole, out / "result.pt")
    dist.destroy_process_group()


def finish(writing: tuple[int, object], out: Path, rank: int) -> None:
    """All shards of a checkpoint are written before it counts."""
    step, future = writing
    future.result()  # type: ignore[attr-defined]
    dist.barrier()
    if rank == 0:
        (out / "newest.tmp").write_text(str(step))
        os.replace(out / "newest.tmp", out / "newest")


main(Path(sys.argv[1]))
