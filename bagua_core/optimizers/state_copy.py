"""Copies an optimizer's own state, so that steps of it can be undone."""

from __future__ import annotations

import copy
from typing import Any

import torch


class OptimizerStateCopy:
    """The state as it is now. Tensors are put back in place, for others may hold views of them."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._state = {p: copy.deepcopy(dict(state)) for p, state in optimizer.state.items()}

    @torch.no_grad()
    def put_back(self) -> None:
        """Once: the optimizer may keep what was saved."""
        state = self._optimizer.state
        for parameter in [p for p in state if p not in self._state]:
            del state[parameter]
        for parameter, saved_state in self._state.items():
            now = state[parameter]
            restored = {name: _restored(now.get(name), saved) for name, saved in saved_state.items()}
            now.clear()
            now.update(restored)


def _restored(now: Any, saved: Any) -> Any:
    fits = isinstance(now, torch.Tensor) and isinstance(saved, torch.Tensor) and now.shape == saved.shape
    return now.copy_(saved) if fits else saved
