"""Copies an optimizer's own state, so that steps of it can be undone, and computes its size.

Beside a dictionary for each parameter a state may have values of the whole optimizer under names of its own, as
MADGRAD's counter of steps.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch

from bagua_core.model.sharded_tensors import is_sharded, like, local, local_bytes


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Returns the size, in bytes, of the state's tensors on this worker."""
    return _bytes(optimizer.state)


def _bytes(value: Any) -> int:
    if isinstance(value, Mapping):
        return sum(map(_bytes, value.values()))
    return sum(map(_bytes, value)) if isinstance(value, list | tuple) else local_bytes(value)


class OptimizerStateCopy:
    """A copy of the state as it is now. Tensors are put back in place, for others may hold views of them."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._state = {key: _copied(value) for key, value in optimizer.state.items()}

    @torch.no_grad()
    def put_back(self) -> None:
        """Restores the saved state. Callable once: the optimizer may keep what was saved."""
        state: dict[Any, Any] = self._optimizer.state
        for key in [key for key in state if key not in self._state]:
            del state[key]
        for key, saved in self._state.items():
            now = state.get(key)
            if isinstance(now, dict) and isinstance(saved, dict):
                restored = {name: _restored(now.get(name), value) for name, value in saved.items()}
                now.clear()
                now.update(restored)
            else:
                state[key] = _restored(now, saved)


def _copied(value: Any) -> Any:
    """Returns a deep copy. Of a sharded tensor its local tensor is copied, and the mesh is shared."""
    values = value.values() if isinstance(value, Mapping) else (value,)
    kept = {id(v): like(v, local(v).clone()) for v in values if is_sharded(v)}
    return copy.deepcopy(value, kept)


def _restored(now: Any, saved: Any) -> Any:
    fits = isinstance(now, torch.Tensor) and isinstance(saved, torch.Tensor) and now.shape == saved.shape
    if not fits or is_sharded(now) != is_sharded(saved):
        return saved
    local(now).copy_(local(saved))
    return now
