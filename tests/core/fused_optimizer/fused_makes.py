"""Optimizers that the tests of fused scripts make."""

from __future__ import annotations

import io
from typing import Any

import torch

from tests.core.fused_optimizer.third_party import Lion


def adam(params: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, lr=1e-2)


def momentum(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=1e-2, momentum=0.9)


def descent(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=1e-2)


MAKES = [adam, momentum, descent, Lion]


def saved(state: Any) -> Any:
    """Through a file."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file)
