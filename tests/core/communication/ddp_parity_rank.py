"""One of two ranks that train a net under torch's DDP and under Bagua's, and compare after every step."""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from bagua_core.communication.communicator import AbortFlag
from bagua_core.communication.transports.gloo import build_gloo
from bagua_core.parallel import DistributedDataParallel
from tests.core.communication.worlds import FakeEngine

global_rank, folder = int(sys.argv[1]), Path(sys.argv[2])
torch.set_num_threads(1)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(20, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU()
        )
        self.head = nn.Linear(64, 5)
        self.side = nn.Linear(64, 5)

    def forward(self, x: torch.Tensor, with_side: bool) -> torch.Tensor:
        hidden = self.body(x)
        y: torch.Tensor = self.head(hidden)
        return y + self.side(hidden) if with_side else y


def train(model: nn.Module, optimizer: torch.optim.Optimizer, kept: list[torch.Tensor]) -> None:
    data = torch.Generator().manual_seed(10 + global_rank)
    for step in range(6):
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        if step == 3:
            with model.no_sync():  # type: ignore[operator]
                model(torch.randn(8, 20, generator=data), True).square().mean().backward()
        # every parameter is used by some rank; one that no rank uses stays None in torch and is zero here
        model(torch.randn(8, 20, generator=data), step < 4 or global_rank == 1).square().mean().backward()
        kept.extend(p.grad.clone() for p in model.parameters() if p.grad is not None)
        optimizer.step()
    kept.extend(p.detach().clone() for p in model.parameters())


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    inner = Net()
    return inner, torch.optim.AdamW(inner.parameters(), lr=0.01)


dist.init_process_group("gloo", init_method=f"file://{folder}/torch", rank=global_rank, world_size=2)
theirs: list[torch.Tensor] = []
inner, optimizer = build()
train(TorchDDP(inner, bucket_cap_mb=0.01, find_unused_parameters=True), optimizer, theirs)

ours: list[torch.Tensor] = []
inner, optimizer = build()
store = dist.FileStore(f"{folder}/bagua", 2)
engine = FakeEngine(build_gloo(1, global_rank, 2, store, "127.0.0.1", 20.0, AbortFlag()))
train(DistributedDataParallel(inner, [optimizer], bucket_cap_mb=0.01, engine=engine), optimizer, ours)
assert len(engine.pairs) == 6 and engine.failed is None

assert len(ours) == len(theirs)
for mine, other in zip(ours, theirs, strict=True):
    torch.testing.assert_close(mine, other)
torch.save(ours, folder / f"ours-{global_rank}.pt")
dist.barrier()
sys.stdout.flush()
os._exit(0)  # groups are not taken down: the other rank may be a moment behind
