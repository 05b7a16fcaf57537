"""One of two ranks that do what scripts do around DDP, with torch's and with Bagua's, and compare after every step."""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.utils.checkpoint import checkpoint

from bagua_core.communication.communicator import AbortFlag
from bagua_core.communication.transports.gloo import build_gloo
from bagua_core.parallel import DistributedDataParallel
from tests.core.communication.worlds import FakeEngine

global_rank, folder = int(sys.argv[1]), Path(sys.argv[2])
STEPS = 4
torch._dynamo.config.optimize_ddp = False  # torch's own splitting of graphs refuses buckets as small as these
torch.set_num_threads(1)


class Net(nn.Module):
    """first and last share a weight, one layer is frozen, one is bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(12, 12), nn.Linear(12, 12)
        self.last.weight = self.first.weight
        self.frozen = nn.Linear(12, 12).requires_grad_(False)
        self.narrow = nn.Linear(12, 12, dtype=torch.bfloat16)
        self.image = nn.Conv2d(1, 2, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.frozen(torch.tanh(self.first(x)))
        h = h + self.narrow(h.to(torch.bfloat16)).float()
        picture = self.image(h.view(-1, 1, 3, 4)).sum((1, 2, 3), keepdim=False)
        y: torch.Tensor = self.last(h) + picture[:, None]
        return y


class Checkpointed(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = checkpoint(lambda v: torch.tanh(self.first(v)), x, use_reentrant=False)
        y: torch.Tensor = self.last(h)
        return y


Train = Callable[[nn.Module, torch.optim.Optimizer, Any, list[torch.Tensor]], None]


def plain(model: nn.Module, optimizer: torch.optim.Optimizer, data: Any, kept: list[torch.Tensor]) -> None:
    optimizer.zero_grad()
    model(data()).square().mean().backward()
    optimizer.step()


def clipped(model: nn.Module, optimizer: torch.optim.Optimizer, data: Any, kept: list[torch.Tensor]) -> None:
    optimizer.zero_grad()
    model(data()).square().mean().backward()
    kept.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05))
    optimizer.step()


def accumulated(
    model: nn.Module, optimizer: torch.optim.Optimizer, data: Any, kept: list[torch.Tensor]
) -> None:
    optimizer.zero_grad()
    for _ in range(2):
        with model.no_sync():  # type: ignore[operator]
            (model(data()).square().mean() / 3).backward()
    (model(data()).square().mean() / 3).backward()
    optimizer.step()


def autocast(model: nn.Module, optimizer: torch.optim.Optimizer, data: Any, kept: list[torch.Tensor]) -> None:
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(data()).float().square().mean()
    loss.backward()
    optimizer.step()


def inputs_with_gradients(
    model: nn.Module, optimizer: torch.optim.Optimizer, data: Any, kept: list[torch.Tensor]
) -> None:
    x = data().requires_grad_(True)
    optimizer.zero_grad()
    model(x).square().mean().backward()
    kept.append(x.grad.clone())
    optimizer.step()


class Scaled:
    """GradScaler whose second step overflows: torch skips it, and so must we on every rank."""

    def __init__(self) -> None:
        self.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        self.step = 0

    def __call__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, data: Any, kept: list[torch.Tensor]
    ) -> None:
        optimizer.zero_grad()
        factor = torch.inf if self.step == 1 and global_rank == 1 else 1.0
        self.scaler.scale(model(data()).square().mean() * factor).backward()
        self.scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        self.scaler.step(optimizer)
        self.scaler.update()
        kept.append(torch.tensor(self.scaler.get_scale()))
        self.step += 1


def same(module: nn.Module) -> nn.Module:
    return module


def compiled(module: nn.Module) -> nn.Module:
    # everything of torch.compile but the generated code: graphs, autograd's ahead-of-time trace, hooks
    return torch.compile(module, backend="aot_eager")  # type: ignore[return-value]


CASES: dict[
    str, tuple[type[Net], Callable[[nn.Module], nn.Module], Callable[[nn.Module], nn.Module], Any]
] = {
    # name: net, done to it before it is wrapped, done to the wrapped, a step's body
    "plain": (Net, same, same, lambda: plain),
    "clipped": (Net, same, same, lambda: clipped),
    "accumulated": (Net, same, same, lambda: accumulated),
    "autocast": (Net, same, same, lambda: autocast),
    "scaled": (Net, same, same, Scaled),
    "input gradients": (Net, same, same, lambda: inputs_with_gradients),
    "checkpointed": (Checkpointed, same, same, lambda: plain),
    "compiled inside": (Net, compiled, same, lambda: plain),
    "compiled outside": (Net, same, compiled, lambda: plain),
}


def train(case: str, wrap: Callable[[nn.Module, torch.optim.Optimizer], nn.Module]) -> list[torch.Tensor]:
    net, before, after, body = CASES[case]
    torch.manual_seed(0)
    inner = net()
    optimizer = torch.optim.AdamW([p for p in inner.parameters() if p.requires_grad], lr=0.01)
    model = after(wrap(before(inner), optimizer))
    generator = torch.Generator().manual_seed(10 + global_rank)
    step: Train = body()
    kept: list[torch.Tensor] = []
    for _ in range(STEPS):
        step(model, optimizer, lambda: torch.randn(8, 12, generator=generator), kept)
        kept.extend(p.grad.clone() for p in inner.parameters() if p.grad is not None)
    kept.extend(p.detach().clone() for p in inner.parameters())
    return kept


dist.init_process_group("gloo", init_method=f"file://{folder}/torch", rank=global_rank, world_size=2)
store = dist.FileStore(f"{folder}/bagua", 2)
communicator = build_gloo(1, global_rank, 2, store, "127.0.0.1", 60.0, AbortFlag())
results: dict[str, list[torch.Tensor]] = {}
for case in CASES:
    unused = CASES[case][0] is Checkpointed
    theirs = train(
        case,
        lambda inner, _: TorchDDP(inner, bucket_cap_mb=0.0005, find_unused_parameters=unused),  # noqa: B023
    )
    engine = FakeEngine(communicator)
    ours = train(
        case,
        lambda inner, optimizer: DistributedDataParallel(
            inner,
            [optimizer],
            bucket_cap_mb=0.0005,
            find_unused_parameters=unused,  # noqa: B023
            engine=engine,  # noqa: B023
        ),
    )
    assert len(engine.pairs) == STEPS and engine.failed is None, case
    assert len(ours) == len(theirs), (case, len(ours), len(theirs))
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, equal_nan=True, msg=lambda text: f"{case}: {text}")  # noqa: B023
    results[case] = ours
    torch._dynamo.reset()
torch.save(results, folder / f"features-{global_rank}.pt")
dist.barrier()
sys.stdout.flush()
os._exit(0)  # groups are not taken down: the other rank may be a moment behind
