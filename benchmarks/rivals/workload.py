"""The common workload of all systems in these benchmarks, and the line that it writes for a committed step.

The lines have the form of Bagua's ledger, so that one reader serves all systems. Owns nothing elastic: how a
system survives a loss is in its own script beside this file.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import Dataset

WIDTH = 512
CLASSES = 16
SAMPLES = 300_000  # more than any trial uses in one epoch
DEVICE_S = 0.02
_ROWS = 2048


class Samples(Dataset[tuple[torch.Tensor, torch.Tensor, int]]):
    """`length` samples over a small table of random rows; each says its own index."""

    def __init__(self, length: int = SAMPLES) -> None:
        generator = torch.Generator().manual_seed(0)
        self._rows = torch.randn(_ROWS, WIDTH, generator=generator)
        self._targets = torch.randint(CLASSES, (_ROWS,), generator=generator)
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor, int]:
        if not 0 <= index < self._length:
            raise IndexError(index)
        row = index % _ROWS
        return self._rows[row], self._targets[row], index


def mlp(width: int = WIDTH, layers: int = 4) -> nn.Sequential:
    """`layers` square layers and a small head: 1.06 M parameters by default."""
    torch.manual_seed(0)
    parts: list[nn.Module] = []
    for _ in range(layers):
        parts += [nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(*parts, nn.Linear(width, CLASSES))


def device_time() -> None:
    """The time in which a real job's device computes and its processors are idle.

    Three hosts share this machine's few cores. Steps that keep all of them busy would measure how the kernel
    divides them between training and a newcomer's imports, which no real host has to do.
    """
    time.sleep(DEVICE_S)


class StepLog:
    """Appends one line per committed step, and one per step that was given up, to a file of this process."""

    def __init__(self, directory: str, worker: str) -> None:
        Path(directory).mkdir(parents=True, exist_ok=True)
        path = Path(directory) / f"{worker}-{os.getpid()}.jsonl"
        self._descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def committed(
        self, step: int, world_size: int, samples: Sequence[int], *, generation: int = 0, rank: int = 0
    ) -> None:
        self._write("committed", step, world_size, samples, generation, rank)

    def given_up(self, step: int, world_size: int, samples: Sequence[int]) -> None:
        self._write("given_up", step, world_size, samples, 0, 0)

    def _write(
        self, kind: str, step: int, world_size: int, samples: Sequence[int], generation: int, rank: int
    ) -> None:
        line = {
            "time": time.time(),
            "generation": generation,
            "step": step,
            "global_rank": rank,
            "world_size": world_size,
            "epoch": 0,
            "samples": list(samples),
            "kind": kind,
        }
        os.write(self._descriptor, json.dumps(line, separators=(",", ":")).encode() + b"\n")
