"""The models and data of the drawn scripts: small, smooth, and such that their mathematics ignores the split.

No layer looks at other samples of the batch, activations have no kinks at which rounding could choose a side, and
dropout masks follow from (epoch, sample).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.differential.features import PLAIN, Features

INPUTS, HIDDEN, OUTPUTS = 6, 8, 3
ENCODER_KEEPS, KEPT = 0.8, 0.75


class Net(nn.Module):
    def __init__(self, f: Features, dtype: torch.dtype) -> None:
        super().__init__()
        self.f = f
        self.first = nn.Linear(INPUTS, HIDDEN)
        self.norm: nn.Module = {
            "layer": nn.LayerNorm(HIDDEN),
            "group": nn.GroupNorm(2, HIDDEN),
        }.get(f.norm, nn.Identity())
        self.middle = nn.Linear(HIDDEN, HIDDEN)
        if f.branch != PLAIN:
            self.branch = nn.Linear(HIDDEN, HIDDEN)
        self.last = nn.Linear(HIDDEN, OUTPUTS)
        if f.encoder != PLAIN:
            self.encoder = nn.Linear(INPUTS, HIDDEN).requires_grad_(False)
            self.encoder.load_state_dict(self.first.state_dict())
        if f.buffers != PLAIN:
            # another value on each worker, as the parameters
            self.register_buffer("forwards", torch.randint(0, 100, ()))
        self.to(dtype)
        if f.average in ("buffers", "parameters"):
            for name, p in list(self.named_parameters()):
                copy = p.detach().clone()
                name = "average_" + name.replace(".", "_")
                if f.average == "buffers":
                    self.register_buffer(name, copy)
                else:
                    self.register_parameter(name, nn.Parameter(copy, requires_grad=False))

    def forward(self, x: Tensor, mask: Tensor | None = None, branches: bool = False) -> Tensor:
        if self.training and self.f.buffers == "counted":
            self.forwards += 1
        elif self.training and self.f.buffers == "reassigned":
            self.forwards = self.forwards + 1
        h = torch.tanh(self.norm(self.first(x)))
        if self.f.encoder != PLAIN:
            if self.training:
                with torch.no_grad():
                    for kept, p in zip(self.encoder.parameters(), self.first.parameters(), strict=True):
                        kept.mul_(ENCODER_KEEPS).add_(p, alpha=1 - ENCODER_KEEPS)
            h = h + torch.tanh(self.encoder(x))
        h = torch.tanh(self.middle(h))
        if mask is not None:
            h = h * mask
        if branches:
            h = h + torch.tanh(self.branch(h))
        out: Tensor = self.last(h)
        return out

    @torch.no_grad()
    def update_average(self) -> None:
        """EMA of the trained weights, in place."""
        kept = dict(self.named_buffers()) | dict(self.named_parameters())
        for name, p in self.named_parameters():
            if not name.startswith("average_"):
                kept["average_" + name.replace(".", "_")].mul_(0.9).add_(p, alpha=0.1)


class Samples(torch.utils.data.Dataset[tuple[int, Tensor, Tensor]]):
    """(index, input, target), each the same in every process."""

    def __init__(self, f: Features, dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(f.seed + 17)
        count = f.samples
        self.x = torch.randn(count, INPUTS, generator=generator, dtype=torch.float64).to(dtype)
        self.y = torch.randn(count, OUTPUTS, generator=generator, dtype=torch.float64).to(dtype)
        self.masks = (
            torch.rand(f.epochs, count, HIDDEN, generator=generator) < KEPT if f.dropout != PLAIN else None
        )

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[int, Tensor, Tensor]:
        return index, self.x[index], self.y[index]

    def mask(self, epoch: int, index: Tensor) -> Tensor | None:
        return None if self.masks is None else self.masks[epoch][index].to(self.x.dtype) / KEPT
