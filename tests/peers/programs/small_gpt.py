"""A small GPT on characters: gradient accumulation, a cosine schedule, clipping, checkpoints by rank 0."""

from __future__ import annotations

import math
import os
import sys
from contextlib import nullcontext
from pathlib import Path

import ending_once
import torch
from torch import nn
from torch.distributed import barrier, destroy_process_group, init_process_group
from torch.nn.parallel import DistributedDataParallel

TEXT = "the quick brown fox jumps over the lazy dog. " * 40
BLOCK, WIDTH, HEADS, STEPS, EVERY, ACCUMULATE = 16, 32, 2, 12, 4, 2
VOCABULARY = sorted(set(TEXT))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.heads = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        split = self.heads(self.norms[0](x)).view(batch, length, 3, HEADS, WIDTH // HEADS)
        query, key, value = split.permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, WIDTH))
        return x + self.mlp(self.norms[1](x))


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(len(VOCABULARY), WIDTH)
        self.places = nn.Embedding(BLOCK, WIDTH)
        self.layers = nn.Sequential(Layer(), Layer(), nn.LayerNorm(WIDTH))
        self.head = nn.Linear(WIDTH, len(VOCABULARY), bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        hidden = self.layers(self.tokens(x) + self.places(torch.arange(x.shape[1])))
        return nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), y.flatten())


def main(out: Path) -> None:
    is_ddp = int(os.environ.get("RANK", -1)) != -1
    rank, world_size = 0, 1
    if is_ddp:
        init_process_group(backend="gloo")
        rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.manual_seed(1337)
    text = torch.tensor([VOCABULARY.index(c) for c in TEXT])
    raw = GPT()
    optimizer = torch.optim.AdamW(raw.parameters(), lr=1e-3, betas=(0.9, 0.95))
    checkpoint, first = out / "ckpt.pt", 0
    if checkpoint.exists():
        saved = torch.load(checkpoint)
        raw.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        first = saved["step"]
    model = DistributedDataParallel(raw) if is_ddp else raw
    for step in range(first, STEPS):
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * 0.5 * (1 + math.cos(math.pi * step / STEPS))
        for micro in range(ACCUMULATE):
            generator = torch.Generator().manual_seed((step * ACCUMULATE + micro) * world_size + rank)
            begins = torch.randint(len(text) - BLOCK - 1, (4,), generator=generator).tolist()
            x = torch.stack([text[i : i + BLOCK] for i in begins])
            y = torch.stack([text[i + 1 : i + 1 + BLOCK] for i in begins])
            last = micro == ACCUMULATE - 1
            alone = (
                model.no_sync() if isinstance(model, DistributedDataParallel) and not last else nullcontext()
            )
            with alone:
                (model(x, y) / ACCUMULATE).backward()
        nn.utils.clip_grad_norm_(raw.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if (step + 1) % EVERY == 0:
            if rank == 0:
                state = {"model": raw.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1}
                torch.save(state, out / "ckpt.tmp")
                (out / "ckpt.tmp").rename(checkpoint)
            if is_ddp:
                barrier()
            ending_once.here(out, rank, step + 1)
    if rank == 0:
        torch.save(raw.state_dict(), out / "result.pt")
    if is_ddp:
        destroy_process_group()


main(Path(sys.argv[1]))
