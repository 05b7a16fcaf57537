"""The models and data of the drawn scripts: small, smooth, and such that their mathematics ignores the split.

Activations have no kinks at which rounding could choose a side. Batch normalization of a worker's own share and
nn.Dropout depend on the split; shares.py repeats them in one process.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bagua_core as bagua
from tests.differential.features import PLAIN, Features

INPUTS, HIDDEN, OUTPUTS = 6, 8, 3
CHANNELS = 2  # of batch normalization: a share of one sample has several values in each
ENCODER_KEEPS, KEPT = 0.8, 0.75


class ShareBatchNorm(nn.BatchNorm1d):
    """rows: in one process, those of each worker's share; empty where the whole input is the worker's own share."""

    rows: Sequence[Tensor] = ()

    def forward(self, input: Tensor) -> Tensor:
        if not self.training or not self.rows:
            return super().forward(input)
        parts = [super().forward(input[self.rows[0]])]
        parts += [
            F.batch_norm(input[rows], None, None, self.weight, self.bias, training=True)
            for rows in self.rows[1:]
        ]
        return torch.cat(parts)[torch.cat(list(self.rows)).argsort()]


class Net(nn.Module):
    def __init__(self, f: Features, dtype: torch.dtype) -> None:
        super().__init__()
        self.f = f
        self.first = nn.Linear(INPUTS, HIDDEN)
        self.norm: nn.Module = {
            "layer": nn.LayerNorm(HIDDEN),
            "group": nn.GroupNorm(2, HIDDEN),
            "batch": ShareBatchNorm(CHANNELS),
            "sync_batch": bagua.SyncBatchNorm.convert(nn.BatchNorm1d(CHANNELS)),
        }.get(f.norm, nn.Identity())
        self.dropout = nn.Dropout(1 - KEPT)
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
        h = self.first(x)
        if self.f.norm in ("batch", "sync_batch"):
            h = self.norm(h.view(len(h), CHANNELS, -1)).view_as(h)
        else:
            h = self.norm(h)
        h = torch.tanh(h)
        if self.f.encoder != PLAIN:
            if self.training:
                with torch.no_grad():
                    for kept, p in zip(self.encoder.parameters(), self.first.parameters(), strict=True):
                        kept.mul_(ENCODER_KEEPS).add_(p, alpha=1 - ENCODER_KEEPS)
            h = h + torch.tanh(self.encoder(x))
        h = torch.tanh(self.middle(h))
        if mask is not None:
            h = h * mask
        elif self.f.dropout == "layer":
            h = self.dropout(h)
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


class Critic(nn.Module):
    """The second model of a step, with a batch normalization if the first one has such."""

    def __init__(self, f: Features, dtype: torch.dtype) -> None:
        super().__init__()
        normalizes = f.norm in ("batch", "sync_batch")
        # without a bias, whose gradient before a normalization is rounding alone
        self.first = nn.Linear(OUTPUTS, 6, bias=not normalizes)
        self.norm: nn.Module = {
            "batch": ShareBatchNorm(CHANNELS),
            "sync_batch": bagua.SyncBatchNorm(CHANNELS),
        }.get(f.norm, nn.Identity())
        self.last = nn.Linear(6, 1)
        self.to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        out: Tensor = self.last(torch.tanh(self.norm(h.view(len(h), CHANNELS, -1)).view_as(h)))
        return out


class Samples(torch.utils.data.Dataset[tuple[int, Tensor, Tensor]]):
    """(index, input, target), each the same in every process."""

    def __init__(self, f: Features, dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(f.seed + 17)
        count = f.samples
        self.x = torch.randn(count, INPUTS, generator=generator, dtype=torch.float64).to(dtype)
        self.y = torch.randn(count, OUTPUTS, generator=generator, dtype=torch.float64).to(dtype)
        self.masks = (
            torch.rand(f.epochs, count, HIDDEN, generator=generator) < KEPT
            if f.dropout == "by_sample"
            else None
        )

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[int, Tensor, Tensor]:
        return index, self.x[index], self.y[index]

    def mask(self, epoch: int, index: Tensor) -> Tensor | None:
        return None if self.masks is None else self.masks[epoch][index].to(self.x.dtype) / KEPT
