"""The workers' shares of each step, for the one process that repeats a job whose layers look at their own share.

nn.Dropout draws by step and rank, and batch normalization by the share, so what a job gives depends on its history. The
job's ledger says which rank had which samples; with that, one process can do the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from bagua_core.elastic.step.step_seed import step_seed
from tests.differential.features import Features
from tests.differential.models import HIDDEN, KEPT
from tests.lab import ledger


class Shares:
    def __init__(self, f: Features, directory: Path) -> None:
        self._seed = f.seed
        self._of_steps: dict[int, list[tuple[int, Sequence[int]]]] = {}
        for line in ledger.read(directory).lines:
            if line.samples:
                self._of_steps.setdefault(line.step - 1, []).append((line.global_rank, line.samples))
        for shares in self._of_steps.values():
            shares.sort()

    def rows(self, step: int, index: Tensor) -> list[Tensor]:
        """Of the batch `index`, the rows of each rank in its order."""
        place = {sample: row for row, sample in enumerate(index.tolist())}
        return [torch.tensor([place[s] for s in samples]) for _, samples in self._of_steps[step]]

    def dropout(self, step: int, index: Tensor, dtype: torch.dtype) -> Tensor:
        """What nn.Dropout multiplies each row of the batch by."""
        masks = torch.empty(len(index), HIDDEN, dtype=dtype)
        for (rank, samples), rows in zip(self._of_steps[step], self.rows(step, index), strict=True):
            torch.manual_seed(step_seed(self._seed, step, rank))
            masks[rows] = F.dropout(torch.ones(len(samples), HIDDEN, dtype=dtype), 1 - KEPT)
        return masks
