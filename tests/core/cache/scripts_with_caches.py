"""Data sets and small programs that the tests of the cache run, some of them in processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from bagua_core.cache import write_behind

ROOT = Path(__file__).parents[3]


class Counted(torch.utils.data.Dataset[Any]):
    """Sample i is (a tensor of i, i). Says in `log` which samples were computed, by appending to a file."""

    def __init__(self, length: int, log: Path, size: int = 100) -> None:
        self.length = length
        self.log = log
        self.size = size

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        if index >= self.length:
            raise IndexError(index)
        descriptor = os.open(self.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            os.write(descriptor, b"%d\n" % index)
        finally:
            os.close(descriptor)
        return torch.full((self.size,), float(index)), index

    def computed(self) -> list[int]:
        return [int(line) for line in self.log.read_text().split()] if self.log.exists() else []


def right(batch: Any) -> bool:
    """Whether every sample of a collated batch is what the data set gives."""
    tensors, numbers = batch
    return bool((tensors == numbers[:, None].to(tensors.dtype)).all())


def writes_only_at_its_end(_worker: int) -> None:
    """For a loader's process: what it has to write waits until it ends."""
    write_behind.GATHER_S = 600.0


def python(program: str, *arguments: str, **options: Any) -> subprocess.Popen[str]:
    """A Python of its own that runs `program`."""
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'protos'}", "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-c", program, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**environment, **options.pop("env", {})},
        **options,
    )
