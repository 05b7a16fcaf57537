"""Copies an optimizer's own state, so that steps of it can be undone."""

from __future__ import annotations

import copy
from typing import Any

import torch

from bagua_core.model.sharded_tensors import is_sharded, like, local


class OptimizerStateCopy:
    """The state as it is now. Tensors are put back in place, for others may hold views of them."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._state = {p: _copied(state) for p, state in optimizer.state.items()}

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


def _copied(state: Any) -> dict[str, Any]:
    """A deep copy. Of a sharded tensor its local tensor is copied, and the mesh is shared."""
    kept = {id(v): like(v, local(v).clone()) for v in state.values() if is_sharded(v)}
    found: dict[str, Any] = copy.deepcopy(dict(state), kept)
    return found


def _restored(now: Any, saved: Any) -> Any:
    fits = isinstance(now, torch.Tensor) and isinstance(saved, torch.Tensor) and now.shape == saved.shape
    if not fits or is_sharded(now) != is_sharded(saved):
        return saved
    local(now).copy_(local(saved))
    return now
